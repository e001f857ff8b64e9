// SPDX-License-Identifier: Apache-2.0
//
// What is recorded of a session, and where: folders appear whole, ids cannot leave the directory, the size is bounded,
// and what was truncated is not there.

#include "server/obs/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace ctkvr::obs {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint32_t kDim = 16;

class RecorderTest : public ::testing::Test {
 protected:
  RecorderTest()
      : directory_(fs::path(::testing::TempDir()) / ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(directory_);
    fs::create_directory(directory_);
    LayerConfig layer;
    layer.q_heads = 2;
    layer.kv_heads = 1;
    layer.head_dim = layer.value_dim = kDim;
    layer.softmax.scale = 0.25f;
    config_.layers = {layer};
    config_.dtype = DType::kF32;
    Make(uint64_t{1} << 20);
  }
  ~RecorderTest() override { fs::remove_all(directory_); }
  void Make(uint64_t bytes_max) {
    recorder_.reset();
    auto recorder = Recorder::Create({.directory = directory_.string(), .bytes_max = bytes_max}, log_);
    ASSERT_TRUE(recorder.ok()) << recorder.status();
    recorder_ = *std::move(recorder);
  }
  static std::vector<float> Row(float value, uint32_t heads) { return std::vector<float>(size_t{heads} * kDim, value); }
  // One token whose every key is its position, with its query where `asks`.
  void Append(uint32_t position, uint64_t epoch = 7) {
    const std::vector<float> row = Row(static_cast<float>(position), 1), query = Row(-static_cast<float>(position), 2);
    recorder_->Appended(epoch, {.first_position = position,
                                .tokens = 1,
                                .query_positions = 1,
                                .dtype = DType::kF32,
                                .kv_heads = 1,
                                .head_dim = kDim,
                                .value_dim = kDim,
                                .q_heads = 2,
                                .keys = std::as_bytes(std::span(row)),
                                .values = std::as_bytes(std::span(row)),
                                .queries = std::as_bytes(std::span(query))});
  }
  void Answer(uint32_t position, std::vector<uint32_t> chosen, uint64_t epoch = 7) {
    const std::vector<float> query = Row(1, 2);
    ctkvr::Answer answer;
    answer.source = Source::kSketch;
    answer.explanation = Explanation{.reason = SelectionReason::kMiddle, .scanned = 5};
    Query asked;
    asked.position = position;
    asked.positions = 1;
    asked.q_heads = 2;
    asked.head_dim = kDim;
    asked.queries = std::as_bytes(std::span(query));
    recorder_->Answered(epoch, asked, answer, {std::move(chosen)});
  }
  // Ends everything and names the folders there are.
  std::vector<std::string> End(uint64_t epoch = 7) {
    recorder_->Ended(epoch);
    recorder_.reset();
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  std::string Read(const std::string& path) {
    std::ifstream file(directory_ / path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

  const fs::path directory_;
  Log log_{LogOptions{.level = LogLevel::kOff}};
  SessionConfig config_;
  std::unique_ptr<Recorder> recorder_;
};

TEST_F(RecorderTest, ASessionBecomesAFolderWithALayersArraysAndAnswers) {
  recorder_->Opened("s", 7, config_);
  for (uint32_t p = 0; p < 6; ++p) Append(p);
  Answer(4, {0, 2});
  Answer(5, {1, 3});
  ASSERT_THAT(End(), ElementsAre("s-0000000000000007"));
  const std::string layer = "s-0000000000000007/layer00/";
  const nlohmann::json meta = nlohmann::json::parse(Read(layer + "meta.json"));
  EXPECT_EQ(meta["tokens"], 6);
  EXPECT_EQ(meta["prompt_tokens"], 4);
  EXPECT_EQ(meta["query_first_position"], 0);
  EXPECT_EQ(meta["scale"], 0.25);
  EXPECT_EQ(meta["complete"], true);
  const std::string keys = Read(layer + "k.npy");
  EXPECT_THAT(keys, HasSubstr("'shape': (1, 6, 16)"));
  // Data begins at a multiple of 64; 5.0 is 0x4500 in binary16.
  EXPECT_EQ((keys.size() - 6 * kDim * 2) % 64, 0u);
  EXPECT_EQ(keys.substr(keys.size() - 2), std::string("\x00\x45", 2));
  EXPECT_THAT(Read(layer + "q.npy"), HasSubstr("'shape': (2, 6, 16)"));
  std::istringstream answers(Read(layer + "answers.jsonl"));
  std::string line;
  std::getline(answers, line);
  const nlohmann::json first = nlohmann::json::parse(line);
  EXPECT_EQ(first["position"], 4);
  EXPECT_EQ(first["source"], "sketch");
  EXPECT_EQ(first["reason"], "middle");
  EXPECT_EQ(first["scanned"], 5);
  EXPECT_EQ(first["chosen"], (std::vector<std::vector<uint32_t>>{{0, 2}}));
  EXPECT_TRUE(std::getline(answers, line));
  EXPECT_FALSE(std::getline(answers, line));
}

TEST_F(RecorderTest, NothingIsThereBeforeTheSessionEnds) {
  recorder_->Opened("s", 7, config_);
  Append(0);
  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST_F(RecorderTest, AnIdCannotLeaveTheDirectory) {
  uint64_t epoch = 1;
  for (const std::string& id : {std::string("../../etc/passwd"), std::string("/"), std::string(".."),
                                std::string("a\0b", 3), std::string("\xff\n"), std::string(128, 'x')}) {
    recorder_->Opened(id, epoch, config_);
    Append(0, epoch);
    Append(1, epoch);
    Answer(1, {0}, epoch);
    recorder_->Ended(epoch++);
  }
  EXPECT_THAT(End(), ElementsAre("_-0000000000000002", "__-0000000000000003", "__-0000000000000005",
                                 "______etc_passwd-0000000000000001", "a_b-0000000000000004",
                                 absl::StrCat(std::string(64, 'x'), "-0000000000000006")));
  EXPECT_EQ(nlohmann::json::parse(Read("______etc_passwd-0000000000000001/layer00/meta.json"))["session_id"],
            "../../etc/passwd");
}

TEST_F(RecorderTest, WhatIsOverTheLimitIsLeftOutAndSaid) {
  const uint64_t token_bytes = 4 * kDim * sizeof(float);
  Make(10 * token_bytes);
  recorder_->Opened("s", 7, config_);
  Append(0);
  Append(1);
  Answer(1, {0});
  for (uint32_t p = 2; p < 100; ++p) Append(p);
  ASSERT_THAT(End(), ElementsAre("s-0000000000000007"));
  const nlohmann::json meta = nlohmann::json::parse(Read("s-0000000000000007/layer00/meta.json"));
  EXPECT_LT(meta["tokens"], 10);
  EXPECT_GE(meta["tokens"], 2);
  EXPECT_EQ(meta["complete"], false);
}

TEST_F(RecorderTest, MemoryIsGivenBackWhenASessionIsWritten) {
  Make(4000);
  for (uint64_t epoch = 1; epoch <= 20; ++epoch) {
    recorder_->Opened("s", epoch, config_);
    Append(0, epoch);
    Append(1, epoch);
    Answer(1, {0}, epoch);
    recorder_->Ended(epoch);
    // Written on a thread of its own.
    while (!fs::exists(directory_ / absl::StrCat("s-", absl::Hex(epoch, absl::kZeroPad16)))) std::this_thread::yield();
  }
  const std::vector<std::string> names = End();
  ASSERT_EQ(names.size(), 20u);
  EXPECT_EQ(nlohmann::json::parse(Read(names.back() + "/layer00/meta.json"))["tokens"], 2);
}

TEST_F(RecorderTest, WhatWasTruncatedIsNotThere) {
  recorder_->Opened("s", 7, config_);
  for (uint32_t p = 0; p < 6; ++p) Append(p);
  Answer(3, {0});
  Answer(5, {1});
  recorder_->Truncated(7, 5);
  Append(5);
  ASSERT_THAT(End(), ElementsAre("s-0000000000000007"));
  const std::string layer = "s-0000000000000007/layer00/";
  EXPECT_EQ(nlohmann::json::parse(Read(layer + "meta.json"))["tokens"], 6);
  EXPECT_THAT(Read(layer + "answers.jsonl"), Not(HasSubstr("\"position\":5")));
}

TEST_F(RecorderTest, ADirectoryThatIsNotThereIsRefused) {
  const auto missing = Recorder::Create({.directory = (directory_ / "no").string(), .bytes_max = 1}, log_);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("it must be a directory"));
}

}  // namespace
}  // namespace ctkvr::obs

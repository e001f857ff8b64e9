// SPDX-License-Identifier: Apache-2.0
//
// Proves that a trace is turned from head-major to token-major, and that folders whose files contradict each other are
// refused.
#include "client/cli/trace.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/testing/status_matchers.h"

namespace ctkvr::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

// A folder of its own for each test.
class TraceTest : public ::testing::Test {
 protected:
  TraceTest() {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              (std::string("ctkvr_trace_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    // Element = 100 * head + 10 * token + dimension (queries: 1000 more).
    WriteArray("k.npy", 2, 5, 3, 0);
    WriteArray("v.npy", 2, 5, 1, 0);
    WriteArray("q.npy", 4, 3, 3, 1000);
    meta_ = {{"tokens", 5}, {"prompt_tokens", 4}, {"query_first_position", 2}, {"scale", 0.5}};
  }
  ~TraceTest() override { std::filesystem::remove_all(folder_); }

  void WriteArray(const std::string& name, uint32_t heads, uint32_t tokens, uint32_t dim, uint32_t offset) {
    std::string bytes("\x93NUMPY\x01\x00", 8);
    const std::string header = "{'descr': '<f2', 'fortran_order': False, 'shape': (" + std::to_string(heads) + ", " +
                               std::to_string(tokens) + ", " + std::to_string(dim) + ")}";
    bytes.push_back(static_cast<char>(header.size()));
    bytes.push_back('\0');
    bytes += header;
    for (uint32_t h = 0; h < heads; ++h) {
      for (uint32_t t = 0; t < tokens; ++t) {
        for (uint32_t i = 0; i < dim; ++i) {
          const uint32_t value = offset + 100 * h + 10 * t + i;
          bytes.push_back(static_cast<char>(value & 255));
          bytes.push_back(static_cast<char>(value >> 8));
        }
      }
    }
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }

  absl::StatusOr<Trace> Load() {
    std::ofstream(folder_ / "meta.json") << meta_.dump();
    return LoadTrace(folder_.string());
  }

  std::filesystem::path folder_;
  nlohmann::json meta_;
};

TEST_F(TraceTest, ArraysBecomeTokenMajor) {
  const auto trace = Load();
  ASSERT_THAT(trace, IsOk());
  EXPECT_EQ(trace->name, folder_.filename());
  EXPECT_EQ(trace->group_heads(), 2u);
  EXPECT_EQ(trace->head_dim, 3u);
  EXPECT_EQ(trace->value_dim, 1u);
  EXPECT_FLOAT_EQ(trace->scale, 0.5f);
  EXPECT_THAT(trace->keys_of(1, 1), ElementsAre(10, 11, 12, 110, 111, 112));
  EXPECT_THAT(trace->values_of(3, 2), ElementsAre(30, 130, 40, 140));
  // The first query kept is that of position 2.
  EXPECT_THAT(trace->queries_of(3, 1),
              ElementsAre(1010, 1011, 1012, 1110, 1111, 1112, 1210, 1211, 1212, 1310, 1311, 1312));
}

TEST_F(TraceTest, AFolderWithASlashKeepsItsName) {
  ASSERT_THAT(Load(), IsOk());
  const auto trace = LoadTrace(folder_.string() + "/");
  ASSERT_THAT(trace, IsOk());
  EXPECT_EQ(trace->name, folder_.filename());
}

TEST_F(TraceTest, ContradictionsAreNamed) {
  const auto refused = [this](const char* text) {
    EXPECT_THAT(Load(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  meta_["tokens"] = 6;
  refused("meta.tokens");
  meta_["tokens"] = "five";
  refused("tokens must be a number");
  meta_["tokens"] = 5;
  meta_["prompt_tokens"] = 5;
  refused("prompt_tokens < tokens");
  meta_["prompt_tokens"] = 4;
  meta_["query_first_position"] = 1;
  refused("query_first_position on");
  meta_["query_first_position"] = 2;
  meta_["scale"] = 0;
  refused("scale");
  meta_["scale"] = 1;
  WriteArray("q.npy", 3, 3, 3, 0);
  refused("multiple of kv_heads");
  WriteArray("q.npy", 4, 3, 2, 0);
  refused("same head_dim");
  WriteArray("q.npy", 4, 3, 3, 0);
  WriteArray("v.npy", 1, 5, 3, 0);
  refused("same heads");
  meta_ = "text";
  refused("not a JSON object");
}

TEST_F(TraceTest, AMissingFileIsNamed) {
  std::filesystem::remove(folder_ / "v.npy");
  EXPECT_THAT(Load(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("v.npy")));
}

TEST(Trace, TheRepositorysTraceIsWhatItsMetaSays) {
  const auto trace = LoadTrace(CTKVR_TRACE);
  ASSERT_THAT(trace, IsOk());
  EXPECT_EQ(trace->name, "records-layer07");
  EXPECT_EQ(trace->kv_heads, 1u);
  EXPECT_EQ(trace->q_heads, 3u);
  EXPECT_EQ(trace->tokens, 8105u);
  EXPECT_EQ(trace->prompt_tokens, 7081u);
}

}  // namespace
}  // namespace ctkvr::cli

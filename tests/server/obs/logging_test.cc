// SPDX-License-Identifier: Apache-2.0
//
// Proves that a line stays one line and can be read back whatever bytes a client sends, that levels and the access
// switch do what they say, and that lines hold the fields that operators search for.

#include "server/obs/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <sstream>

#include "nlohmann/json.hpp"
#include "spdlog/sinks/ostream_sink.h"

namespace ctkvr::obs {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;

class LogTest : public ::testing::Test {
 protected:
  Log MakeLog(LogFormat format, LogLevel level = LogLevel::kInfo, bool access = true) {
    return Log({.level = level,
                .format = format,
                .access = access,
                .sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(out_)});
  }
  std::string Text() const { return out_.str(); }
  nlohmann::json Json() const { return nlohmann::json::parse(out_.str()); }

  std::ostringstream out_;
};

AccessRecord Record() {
  return {.method = "Retrieve",
          .code = "OK",
          .session_id = "chat-1",
          .layer = 3,
          .items = 2,
          .duration = std::chrono::microseconds(412),
          .bytes_in = 100,
          .bytes_out = 2000,
          .peer = "ipv4:127.0.0.1:5"};
}

TEST_F(LogTest, AccessLineInTextHoldsEveryField) {
  MakeLog(LogFormat::kText).Access(Record());
  EXPECT_THAT(Text(), MatchesRegex("[0-9]+-[0-9]+-[0-9]+T[0-9:]+\\.[0-9]+Z info access method=\"Retrieve\" code=\"OK\" "
                                   "session=\"chat-1\" layer=3 items=2 us=412 bytes_in=100 bytes_out=2000 "
                                   "peer=\"ipv4:127.0.0.1:5\"\n"));
}

TEST_F(LogTest, AccessLineInJsonHoldsEveryField) {
  AccessRecord record = Record();
  record.code = "NOT_FOUND";
  record.message = "session chat-1 is unknown";
  MakeLog(LogFormat::kJson).Access(record);
  const nlohmann::json line = Json();
  EXPECT_THAT(line.at("ts").get<std::string>(), MatchesRegex("[0-9]+-[0-9]+-[0-9]+T[0-9:]+\\.[0-9]+Z"));
  EXPECT_EQ(line.at("level"), "info");
  EXPECT_EQ(line.at("event"), "access");
  EXPECT_EQ(line.at("method"), "Retrieve");
  EXPECT_EQ(line.at("code"), "NOT_FOUND");
  EXPECT_EQ(line.at("session"), "chat-1");
  EXPECT_EQ(line.at("layer"), 3);
  EXPECT_EQ(line.at("items"), 2);
  EXPECT_EQ(line.at("us"), 412);
  EXPECT_EQ(line.at("bytes_in"), 100);
  EXPECT_EQ(line.at("bytes_out"), 2000);
  EXPECT_EQ(line.at("peer"), "ipv4:127.0.0.1:5");
  EXPECT_EQ(line.at("message"), "session chat-1 is unknown");
}

TEST_F(LogTest, FieldsThatACallDoesNotHaveAreLeftOut) {
  MakeLog(LogFormat::kJson).Access({.method = "GetServerInfo"});
  const nlohmann::json line = Json();
  EXPECT_FALSE(line.contains("session"));
  EXPECT_FALSE(line.contains("layer"));
  EXPECT_FALSE(line.contains("items"));
  EXPECT_FALSE(line.contains("message"));
}

// Every byte, and the forms that would end a line, forge a field or be read as a format.
TEST_F(LogTest, JsonLineWithAnyByteIsOneLineThatParses) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  AccessRecord record = Record();
  record.session_id = bytes + "\",\"level\":\"x\n{}{:d}%v%n\\";
  MakeLog(LogFormat::kJson).Access(record);
  EXPECT_EQ(Text().find('\n'), Text().size() - 1);
  EXPECT_EQ(Json().at("level"), "info");
  EXPECT_THAT(Json().at("session").get<std::string>(), HasSubstr("\",\"level\":\"x\n{}{:d}%v%n\\"));
}

TEST_F(LogTest, TextLineWithAnyByteIsOneLine) {
  AccessRecord record = Record();
  record.session_id = "a\nb\r\x1b[31m\xff layer=9 {}%v";
  MakeLog(LogFormat::kText).Access(record);
  EXPECT_EQ(Text().find('\n'), Text().size() - 1);
  for (char c : Text().substr(0, Text().size() - 1)) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << static_cast<int>(c);
  EXPECT_THAT(Text(), HasSubstr(R"(session="a\nb\r\u001b[31m\ufffd layer=9 {}%v")"));
}

TEST_F(LogTest, EventsCarryEachKindOfValue) {
  MakeLog(LogFormat::kJson)
      .Warning("test",
               {{"a", int64_t{-1}}, {"b", uint64_t{18446744073709551615u}}, {"c", true}, {"d", std::string("x")}});
  EXPECT_EQ(Json().at("level"), "warning");
  EXPECT_EQ(Json().at("a"), -1);
  EXPECT_EQ(Json().at("b"), 18446744073709551615u);
  EXPECT_EQ(Json().at("c"), true);
  EXPECT_EQ(Json().at("d"), "x");
}

TEST_F(LogTest, LinesBelowTheLevelAreNotWritten) {
  Log log = MakeLog(LogFormat::kText, LogLevel::kWarning);
  log.Info("quiet", {});
  log.Access(Record());
  EXPECT_THAT(Text(), IsEmpty());
  log.Error("loud", {});
  EXPECT_THAT(Text(), HasSubstr("error loud"));
}

TEST_F(LogTest, ALineOfATracedCallHoldsItsIds) {
  AccessRecord record = Record();
  record.trace = ParseTraceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
  MakeLog(LogFormat::kJson).Access(record);
  EXPECT_EQ(Json().at("trace_id"), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(Json().at("span_id"), "00f067aa0ba902b7");
}

TEST_F(LogTest, TheLevelMayChange) {
  Log log = MakeLog(LogFormat::kText, LogLevel::kWarning);
  EXPECT_EQ(log.SetLevel(LogLevel::kInfo), LogLevel::kWarning);
  EXPECT_EQ(log.level(), LogLevel::kInfo);
  log.Info("heard", {});
  EXPECT_EQ(log.SetLevel(LogLevel::kError), LogLevel::kInfo);
  log.Info("unheard", {});
  EXPECT_THAT(Text(), HasSubstr(" info heard"));
  EXPECT_THAT(Text(), Not(HasSubstr("unheard")));
}

TEST_F(LogTest, AnAuditIsWrittenAtAnyLevelAndSurvivesHostileText) {
  Log log = MakeLog(LogFormat::kJson, LogLevel::kOff);
  log.Audit({.method = "CloseSessions",
             .code = "NOT_FOUND",
             .message = "none\n",
             .tenant = "t\"",
             .peer = "ipv4:127.0.0.1:5",
             .request = "{\"session_ids\":[\"a\\n\"]}",
             .result = "nothing",
             .trace = ParseTraceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")});
  EXPECT_EQ(Text().find('\n'), Text().size() - 1);
  const nlohmann::json line = Json();
  EXPECT_EQ(line.at("event"), "admin");
  EXPECT_EQ(line.at("method"), "CloseSessions");
  EXPECT_EQ(line.at("code"), "NOT_FOUND");
  EXPECT_EQ(line.at("message"), "none\n");
  EXPECT_EQ(line.at("tenant"), "t\"");
  EXPECT_EQ(line.at("peer"), "ipv4:127.0.0.1:5");
  EXPECT_EQ(line.at("request"), "{\"session_ids\":[\"a\\n\"]}");
  EXPECT_EQ(line.at("result"), "nothing");
  EXPECT_EQ(line.at("trace_id"), "4bf92f3577b34da6a3ce929d0e0e4736");
}

TEST_F(LogTest, LevelNamesAreReadBack) {
  for (LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError, LogLevel::kOff}) {
    EXPECT_EQ(ParseLogLevel(LogLevelName(level)), level);
  }
}

TEST_F(LogTest, LevelOffWritesNothing) {
  Log log = MakeLog(LogFormat::kText, LogLevel::kOff);
  log.Error("loud", {});
  EXPECT_THAT(Text(), IsEmpty());
}

TEST_F(LogTest, AccessLinesOffStillWritesFaultsOfTheServer) {
  Log log = MakeLog(LogFormat::kText, LogLevel::kInfo, /*access=*/false);
  log.Access(Record());
  EXPECT_THAT(Text(), IsEmpty());
  AccessRecord fault = Record();
  fault.code = "INTERNAL";
  fault.server_fault = true;
  log.Access(fault);
  EXPECT_THAT(Text(), HasSubstr(" error access method=\"Retrieve\" code=\"INTERNAL\""));
}

TEST_F(LogTest, ALevelWritesItselfAndWhatIsAbove) {
  Log log = MakeLog(LogFormat::kText, LogLevel::kError);
  log.Warning("below", {});
  log.Error("level", {});
  EXPECT_THAT(Text(), Not(HasSubstr("below")));
  EXPECT_THAT(Text(), HasSubstr("level"));
}

TEST(ParseLogLevelTest, NamesAreReadAndOthersRefused) {
  EXPECT_EQ(ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_EQ(ParseLogLevel("info"), LogLevel::kInfo);
  EXPECT_EQ(ParseLogLevel("warning"), LogLevel::kWarning);
  EXPECT_EQ(ParseLogLevel("error"), LogLevel::kError);
  EXPECT_EQ(ParseLogLevel("off"), LogLevel::kOff);
  EXPECT_EQ(ParseLogLevel("Info"), std::nullopt);
  EXPECT_EQ(ParseLogLevel(""), std::nullopt);
}

TEST(ParseLogFormatTest, NamesAreReadAndOthersRefused) {
  EXPECT_EQ(ParseLogFormat("text"), LogFormat::kText);
  EXPECT_EQ(ParseLogFormat("json"), LogFormat::kJson);
  EXPECT_EQ(ParseLogFormat("xml"), std::nullopt);
}

}  // namespace
}  // namespace ctkvr::obs

// SPDX-License-Identifier: Apache-2.0
//
// Each rule of tests/tidy finds what it is for, and no more: small trees and texts with one fault each.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/tidy/include_rules.h"
#include "tests/tidy/size_rules.h"
#include "tests/tidy/source_tree.h"
#include "tests/tidy/tree_rules.h"
#include "tests/tidy/word_rules.h"

namespace ctkvr::tidy {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

const char kHead[] = "// SPDX-License-Identifier: Apache-2.0\n//\n// Purpose. Thread-safe.\n\n#pragma once\n\n";

TEST(CodeOnlyTest, CommentsAndLiteralsBecomeBlanks) {
  const std::string text =
      "int a; // b\nchar c = '\"'; /* d\n e */ auto f = \"g\\\"h\"; auto i = R\"x(j\")x\"; int k = 1'000;\n";
  const std::string code = CodeOnly(text);
  EXPECT_EQ(code.size(), text.size());
  EXPECT_EQ(SplitLines(code).size(), SplitLines(text).size());
  for (const char* gone : {"// b", "* d", "g\\", "\"h", "j\""}) EXPECT_THAT(code, Not(HasSubstr(gone)));
  for (const char* kept : {"int a;", "char c =", "auto f =", "auto i =", "int k = 1'000;"}) {
    EXPECT_THAT(code, HasSubstr(kept));
  }
}

TEST(IncludesTest, ReadsBothFormsAndSkipsComments) {
  const auto includes = ReadIncludes("#include <vector>\n// #include <map>\n  # include \"kernels/ops.h\"  // why\n");
  ASSERT_THAT(includes, SizeIs(2));
  EXPECT_EQ(includes[0].path, "vector");
  EXPECT_FALSE(includes[0].quoted);
  EXPECT_EQ(includes[1].path, "kernels/ops.h");
  EXPECT_TRUE(includes[1].quoted);
  EXPECT_EQ(includes[1].line, 3u);
}

struct IncludeCase {
  std::string file;
  std::string include;  // as written
  bool allowed;
};

class IncludeTableTest : public ::testing::TestWithParam<IncludeCase> {};

TEST_P(IncludeTableTest, SaysWhoMayIncludeWhom) {
  const IncludeCase& c = GetParam();
  std::vector<SourceFile> tree = {{c.file, "#include " + c.include + "\n"}};
  const std::string path = c.include.substr(1, c.include.size() - 2);
  if (!RoomOf(path).empty()) tree.push_back({path, ""});
  const Findings findings = CheckIncludes(tree);
  if (c.allowed) {
    EXPECT_THAT(findings, IsEmpty());
  } else {
    EXPECT_THAT(findings, Contains(AllOf(HasSubstr("rule 1"), HasSubstr(c.file + ":1"), HasSubstr(path))));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, IncludeTableTest,
    ::testing::Values(IncludeCase{"kernels/base/math.h", "<vector>", true},
                      IncludeCase{"kernels/base/math.h", "\"kernels/ops.h\"", false},
                      IncludeCase{"kernels/base/math.h", "\"absl/status/status.h\"", false},
                      IncludeCase{"kernels/base/status_macros.h", "\"absl/status/status.h\"", true},
                      IncludeCase{"kernels/ops.h", "\"kernels/formats.h\"", true},
                      IncludeCase{"kernels/ops.h", "\"absl/status/status.h\"", false},
                      IncludeCase{"kernels/arena.h", "\"kernels/backend.h\"", true},
                      IncludeCase{"kernels/arena.cc", "\"kernels/cpu/cpu_ops.h\"", false},
                      IncludeCase{"kernels/backend_registry.cc", "\"kernels/cpu/cpu_backend.h\"", true},
                      IncludeCase{"kernels/cpu/scan_avx2.cc", "<immintrin.h>", true},
                      IncludeCase{"kernels/scratch.cc", "<immintrin.h>", false},
                      IncludeCase{"server/core/lane.cc", "\"kernels/backend.h\"", true},
                      IncludeCase{"server/core/lane.cc", "\"kernels/cpu/cpu_ops.h\"", false},
                      IncludeCase{"server/core/lane.cc", "<grpcpp/grpcpp.h>", false},
                      IncludeCase{"server/core/lane.cc", "\"ctkvr/v1/cache.pb.h\"", false},
                      IncludeCase{"server/core/lane.cc", "<spdlog/spdlog.h>", false},
                      IncludeCase{"server/core/lane.cc", "<prometheus/counter.h>", false},
                      IncludeCase{"server/obs/metrics.cc", "<prometheus/counter.h>", true},
                      IncludeCase{"server/obs/metrics.cc", "<grpcpp/grpcpp.h>", false},
                      IncludeCase{"server/rpc/codec.cc", "\"ctkvr/v1/cache.pb.h\"", true},
                      IncludeCase{"server/rpc/codec.cc", "\"kernels/cpu/kernels.h\"", false},
                      IncludeCase{"server/rpc/codec.cc", "<grpcpp/grpcpp.h>", false},
                      IncludeCase{"server/rpc/codec.cc", "\"server/rpc/call.h\"", false},
                      IncludeCase{"server/rpc/call.cc", "\"server/rpc/codec.h\"", true},
                      IncludeCase{"server/main.cc", "\"server/rpc/grpc_server.h\"", true},
                      IncludeCase{"server/main.cc", "\"client/src/x.h\"", false},
                      IncludeCase{"client/src/client.cc", "\"server/core/types.h\"", false},
                      IncludeCase{"client/src/client.cc", "\"kernels/base/dtype.h\"", false},
                      IncludeCase{"client/src/client.cc", "\"ctkvr/v1/cache.grpc.pb.h\"", true},
                      IncludeCase{"client/examples/quickstart.cc", "\"ctkvr/client/client.h\"", true},
                      IncludeCase{"client/examples/quickstart.cc", "\"ctkvr/v1/cache.pb.h\"", false},
                      IncludeCase{"client/cli/main.cc", "\"client/src/x.h\"", false},
                      IncludeCase{"tests/server/core/lane_test.cc", "\"server/core/lane.h\"", true},
                      IncludeCase{"tests/server/core/lane_test.cc", "\"../lane.h\"", false},
                      IncludeCase{"server/core/lane.cc", "\"lane.h\"", false}));

TEST(IncludesTest, FileOutsideEveryRoomIsNamed) {
  EXPECT_THAT(CheckIncludes({{"proto/helper.h", ""}}), ElementsAre(HasSubstr("no room")));
}

TEST(IncludesTest, HeaderThatIsNotThereIsNamed) {
  EXPECT_THAT(CheckIncludes({{"server/core/lane.cc", "#include \"server/core/gone.h\"\n"}}),
              ElementsAre(HasSubstr("does not exist")));
}

TEST(CycleTest, FindsTheCycleAndNothingElse) {
  EXPECT_THAT(FindCycle({{"a", {"b", "c"}}, {"b", {"c"}}}), IsEmpty());
  EXPECT_THAT(FindCycle({{"x", {"a"}}, {"a", {"b"}}, {"b", {"c"}}, {"c", {"a"}}}), SizeIs(4));
  EXPECT_THAT(FindCycle({{"a", {"b"}}, {"b", {"a"}}}), ElementsAre("a", "b", "a"));
}

TEST(CycleTest, RoomsThatIncludeEachOtherAreNamed) {
  const std::vector<SourceFile> tree = {{"server/core/a.cc", "#include \"server/obs/b.h\"\n"},
                                        {"server/obs/b.h", "#include \"server/core/c.h\"\n"},
                                        {"server/core/c.h", ""}};
  EXPECT_THAT(CheckRoomCycles(tree), ElementsAre(HasSubstr("server/core -> server/obs -> server/core")));
}

std::string Body(size_t lines) {
  std::string body;
  for (size_t i = 0; i < lines; ++i) body += "  x();\n";
  return body;
}

TEST(FunctionsTest, CountsFromSignatureToClosingBrace) {
  const std::string text =
      "#define M(x) {\nnamespace n {\nstruct S {\n  int a = 0;\n  std::vector<int> b{1, 2};\n  explicit S(int c)\n"
      "      : a(c), b{3} {\n    if (a) { a = 1; }\n  }\n  int Get() const { return a; }\n};\n"
      "template <typename T>\nT Long(T t) {\n" +
      Body(5) + "}\nint table[] = {1, 2};\nTEST(A, B) {\n  auto f = [] { return \"}\"; };\n}\n}\n";
  const std::vector<Function> functions = FindFunctions(text);
  ASSERT_THAT(functions, SizeIs(4));
  EXPECT_EQ(functions[0].first_line, 6u);
  EXPECT_EQ(functions[0].lines, 4u);
  EXPECT_EQ(functions[1].lines, 1u);
  EXPECT_EQ(functions[2].head, "template <typename T>");
  EXPECT_EQ(functions[2].lines, 8u);
  EXPECT_EQ(functions[3].head, "TEST(A, B)");
  EXPECT_EQ(functions[3].lines, 3u);
}

TEST(SizesTest, LimitsHoldAtTheLimitAndNotAbove) {
  const auto function = [](size_t lines) { return "void F() {\n" + Body(lines - 2) + "}\n"; };
  EXPECT_THAT(CheckSizes({{"kernels/a.cc", function(kFunctionLinesMax)}}), IsEmpty());
  EXPECT_THAT(CheckSizes({{"kernels/a.cc", function(kFunctionLinesMax + 1)}}),
              ElementsAre(AllOf(HasSubstr("rule 9"), HasSubstr("kernels/a.cc:1"), HasSubstr("71 lines"))));
  EXPECT_THAT(CheckSizes({{"kernels/a.h", std::string(kHeaderLinesMax, '\n')}}), IsEmpty());
  EXPECT_THAT(CheckSizes({{"kernels/a.h", std::string(kHeaderLinesMax + 1, '\n')}}), SizeIs(1));
  EXPECT_THAT(CheckSizes({{"kernels/a.cc", std::string(kSourceLinesMax + 1, '\n')}}), SizeIs(1));
  EXPECT_THAT(CheckSizes({{"kernels/a.cc", "//" + std::string(kColumnsMax - 2, 'x')}}), IsEmpty());
  EXPECT_THAT(CheckSizes({{"kernels/a.cc", "//" + std::string(kColumnsMax - 1, 'x')}}), SizeIs(1));
}

TEST(WordsTest, EachWordIsFoundWhereItMayNotStand) {
  const std::vector<SourceFile> faults = {
      {"kernels/a.cc", "// TODO: later\n"},
      {"server/core/a.cc", "std::shared_ptr<int> p;\n"},
      {"tests/a_test.cc", "absl::Mutex m;\n"},
      {"server/core/a.cc", "auto t = std::chrono::steady_clock::now();\n"},
      {"kernels/a.cc", "std::cout << 1;\n"},
      {"client/cli/a.cc", "std::cout << std::endl;\n"},
      {"server/rpc/a.cc", "throw 1;\n"},
      {"server/obs/a.cc", "grpc::Status s;\n"},
      {"server/rpc/a.cc", "spdlog::info(1);\n"},
      {"tests/a_test.cc", "std::random_device device;\n"},
      {"deploy/a", "cp x /tmp/y\n"},
      {"deploy/a", "see https://pypi.org/simple\n"},
      {"tests/CMakeLists.txt", "file(GLOB sources *.cc)\n"},
      {"kernels/a.h", std::string(kHead) + "using namespace std;\n"},
  };
  for (const SourceFile& file : faults)
    EXPECT_THAT(CheckWords({file}), Not(IsEmpty())) << file.path << ": " << file.text;
}

TEST(WordsTest, WordsMayStandWhereTheyBelong) {
  EXPECT_THAT(CheckWords({{"server/rpc/a.cc", "grpc::Status s; std::shared_ptr<int> p;\n"},
                          {"server/core/clock.h", "return std::chrono::steady_clock::now();\n"},
                          {"server/core/a.cc", "// std::shared_ptr would be wrong; \"throw\"\nauto s = \"grpc::\";\n"},
                          {"kernels/base/check.h", "std::fprintf(stderr, x);\n"}}),
              IsEmpty());
}

TEST(FileHeadsTest, EachFaultIsNamed) {
  EXPECT_THAT(CheckFileHeads({{"kernels/a.h", kHead}, {"kernels/a.cc", std::string(kHead).substr(0, 39)}}), IsEmpty());
  EXPECT_THAT(CheckFileHeads({{"kernels/a.cc", "int a;\n"}}), ElementsAre(HasSubstr("SPDX")));
  EXPECT_THAT(CheckFileHeads({{"kernels/a.h", std::string(kHead).substr(0, 39) + "#pragma once\n"}}),
              ElementsAre(HasSubstr("header comment")));
  EXPECT_THAT(CheckFileHeads({{"kernels/a.h", std::string(kHead).substr(0, 65)}}),
              ElementsAre(HasSubstr("#pragma once")));
  EXPECT_THAT(CheckFileHeads({{"kernels/a.cpp", ""}}), ElementsAre(HasSubstr(".h or .cc")));
}

TEST(ContractsTest, AThirdIsEnoughAndLessIsNot) {
  EXPECT_THAT(CheckContracts({{"kernels/ops.h", "// what\nint a;\n\nint b;\n"}}), IsEmpty());
  EXPECT_THAT(CheckContracts({{"kernels/ops.h", "// what\nint a;\nint b;\nint c;\n"}}),
              ElementsAre(HasSubstr("1 of 4")));
  EXPECT_THAT(CheckContracts({{"kernels/arena.h", "int a;\n"}}), IsEmpty());
}

TEST(TopLevelTest, NamesTooManyAndTooFew) {
  std::vector<std::string> names = {"CHANGELOG.md", "CMakeLists.txt", "CMakePresets.json",
                                    "LICENSE",      "README.md",      "client",
                                    "deploy",       "kernels",        "proto",
                                    "server",       "tests",          ".ci"};
  EXPECT_THAT(CheckTopLevel(names), IsEmpty());
  names.push_back("tools");
  EXPECT_THAT(CheckTopLevel(names), ElementsAre(HasSubstr("tools: does not belong")));
  names.erase(names.begin());
  EXPECT_THAT(CheckTopLevel(names), Contains(HasSubstr("CHANGELOG.md: is missing")));
}

TEST(MirrorTest, MirrorPathsFollowTheRooms) {
  EXPECT_EQ(MirrorOf("server/core/lane.cc"), "tests/server/core/lane_test.cc");
  EXPECT_EQ(MirrorOf("client/src/client.cc"), "tests/client/src/client_test.cc");
}

TEST(MirrorTest, SourcesWithoutTestsAreNamed) {
  const SourceFile source = {"kernels/a.cc", ""};
  const SourceFile test = {"tests/kernels/a_test.cc", ""};
  EXPECT_THAT(CheckMirrors({source, test}, {}), IsEmpty());
  EXPECT_THAT(CheckMirrors({source}, {}), ElementsAre(HasSubstr("no mirror test tests/kernels/a_test.cc")));
  EXPECT_THAT(CheckMirrors({source, {"tests/b_test.cc", ""}}, {{"kernels/a.cc", "tests/b_test.cc"}}), IsEmpty());
  EXPECT_THAT(CheckMirrors({source}, {{"kernels/a.cc", "tests/b_test.cc"}}), ElementsAre(HasSubstr("should cover")));
  EXPECT_THAT(CheckMirrors({source, test}, {{"kernels/a.cc", "tests/kernels/a_test.cc"}}),
              ElementsAre(HasSubstr("can go")));
  EXPECT_THAT(CheckMirrors({test}, {{"kernels/a.cc", "tests/kernels/a_test.cc"}}),
              ElementsAre(HasSubstr("is not there")));
}

TEST(NamedInCMakeTest, WholeNamesCount) {
  const SourceFile source = {"tests/kernels/a_test.cc", ""};
  EXPECT_THAT(CheckNamedInCMake({source, {"tests/kernels/CMakeLists.txt", "x(SOURCES a_test.cc)"}}), IsEmpty());
  EXPECT_THAT(CheckNamedInCMake({source, {"tests/CMakeLists.txt", "x(kernels/a_test.cc)"}}), IsEmpty());
  EXPECT_THAT(CheckNamedInCMake({source, {"tests/kernels/CMakeLists.txt", "one_test(a_test)"}}), IsEmpty());
  EXPECT_THAT(CheckNamedInCMake({source, {"e/CMakeLists.txt", "${ROOT}/tests/kernels/a_test.cc"}}), IsEmpty());
  EXPECT_THAT(CheckNamedInCMake({source, {"tests/kernels/CMakeLists.txt", "x(aa_test.cc)"}}),
              ElementsAre(HasSubstr("never built")));
}

TEST(ReadmeMapTest, MapAndTreeMustAgree) {
  const SourceFile source = {"kernels/cpu/a.cc", ""};
  const auto readme = [](const std::string& map) {
    return SourceFile{"README.md", "# x\n\n## Map\n\n```\n" + map + "```\n"};
  };
  EXPECT_THAT(CheckReadmeMap({source, readme("kernels/cpu/  words\n")}), IsEmpty());
  EXPECT_THAT(CheckReadmeMap({source, readme("kernels/cpu/ w\nkernels/gpu/ w\n")}),
              ElementsAre(HasSubstr("kernels/gpu/")));
  EXPECT_THAT(CheckReadmeMap({source, readme("kernels/ w\n")}), ElementsAre(HasSubstr("does not name kernels/cpu/")));
  EXPECT_THAT(CheckReadmeMap({source, {"README.md", "# x\n"}}), ElementsAre(HasSubstr("no fenced map")));
}

TEST(TestsReadmeTest, NamedTestsMustExist) {
  const SourceFile test = {"tests/kernels/a_test.cc", ""};
  EXPECT_THAT(CheckTestsReadme({test, {"tests/README.md", "| claim | `kernels/a_test.cc` |"}}), IsEmpty());
  EXPECT_THAT(CheckTestsReadme({test, {"tests/README.md", "`kernels/b_test.cc`"}}),
              ElementsAre(HasSubstr("not there")));
  EXPECT_THAT(CheckTestsReadme({test, {"tests/README.md", "words"}}), ElementsAre(HasSubstr("names no test")));
}

}  // namespace
}  // namespace ctkvr::tidy

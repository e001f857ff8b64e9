// SPDX-License-Identifier: Apache-2.0
//
// Every operation that backend.h declares has conformance cases: a test suite of this program named after it.

#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace ctkvr::testing {
namespace {

std::vector<std::string> OperationsOfTheHeader() {
  std::ifstream file(CTKVR_BACKEND_HEADER);
  std::stringstream text;
  text << file.rdbuf();
  const std::string header = text.str();
  const std::regex declaration(R"(virtual absl::Status (\w+)\(Stream& \w+, std::span<const (\w+)Item> \w+\))");
  std::vector<std::string> operations;
  for (std::sregex_iterator at(header.begin(), header.end(), declaration), end; at != end; ++at) {
    operations.push_back((*at)[1]);
  }
  return operations;
}

bool HasCases(const std::string& operation) {
  const ::testing::UnitTest& program = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *program.GetTestSuite(i);
    if (std::string(suite.name()).find(operation + "Conformance") != std::string::npos &&
        suite.total_test_count() > 0) {
      return true;
    }
  }
  return false;
}

TEST(OpCoverage, EveryOperationOfTheSeamHasConformanceCases) {
  const std::vector<std::string> operations = OperationsOfTheHeader();
  ASSERT_GE(operations.size(), 12u) << "of " << CTKVR_BACKEND_HEADER;
  for (const std::string& operation : operations) EXPECT_TRUE(HasCases(operation)) << operation;
  EXPECT_FALSE(HasCases("NoSuchOperation"));
}

}  // namespace
}  // namespace ctkvr::testing

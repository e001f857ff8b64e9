// SPDX-License-Identifier: Apache-2.0
//
// The rules of .github/CONTRIBUTING.md that a program can check, on this repository. rules_test.cc shows that each
// rule finds what it is for.

#include <gtest/gtest.h>

#include "tests/tidy/include_rules.h"
#include "tests/tidy/size_rules.h"
#include "tests/tidy/source_tree.h"
#include "tests/tidy/tree_rules.h"
#include "tests/tidy/word_rules.h"

namespace ctkvr::tidy {
namespace {

const std::vector<SourceFile>& Tree() {
  static const auto* const tree = new std::vector<SourceFile>(LoadTree(CTKVR_SOURCE_DIR));
  return *tree;
}

void ExpectNone(const Findings& findings) {
  for (const std::string& finding : findings) ADD_FAILURE() << finding;
}

TEST(TidyTest, TreeWasFound) {
  ASSERT_NE(FindFile(Tree(), "kernels/ops.h"), nullptr) << "no repository at " << CTKVR_SOURCE_DIR;
  ASSERT_NE(FindFile(Tree(), "server/core/engine.h"), nullptr);
}

TEST(TidyTest, TopLevelHoldsWhatTheMapSays) { ExpectNone(CheckTopLevel(TopLevelNames(CTKVR_SOURCE_DIR))); }
TEST(TidyTest, RoomsIncludeOnlyWhatTheyMay) { ExpectNone(CheckIncludes(Tree())); }
TEST(TidyTest, RoomsFormNoCycle) { ExpectNone(CheckRoomCycles(Tree())); }
TEST(TidyTest, FunctionsAndFilesAreSmall) { ExpectNone(CheckSizes(Tree())); }
TEST(TidyTest, BannedWordsAreAbsent) { ExpectNone(CheckWords(Tree())); }
TEST(TidyTest, FilesBeginAsTheyShould) { ExpectNone(CheckFileHeads(Tree())); }
TEST(TidyTest, ContractsExplainThemselves) { ExpectNone(CheckContracts(Tree())); }
TEST(TidyTest, EverySourceHasItsTest) { ExpectNone(CheckMirrors(Tree(), CoveredBy())); }
TEST(TidyTest, EverySourceIsBuilt) { ExpectNone(CheckNamedInCMake(Tree())); }
TEST(TidyTest, ReadmeMapIsTrue) { ExpectNone(CheckReadmeMap(Tree())); }
TEST(TidyTest, TestsReadmeNamesTestsThatExist) { ExpectNone(CheckTestsReadme(Tree())); }

}  // namespace
}  // namespace ctkvr::tidy

// SPDX-License-Identifier: Apache-2.0
//
// Proves that good .npy files are read and damaged ones refused with a message that says what is wrong.
#include "client/cli/npy.h"

#include "tests/testing/status_matchers.h"

namespace ctkvr::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::StatusIs;

std::string Npy(const std::string& dictionary, const std::string& data, int version = 1) {
  std::string out = "\x93NUMPY";
  out.push_back(static_cast<char>(version));
  out.push_back('\0');
  const size_t length = dictionary.size();
  for (int byte = 0; byte < (version == 1 ? 2 : 4); ++byte) out.push_back(static_cast<char>(length >> (8 * byte)));
  return out + dictionary + data;
}

const char kGood[] = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }   \n";

TEST(Npy, AnArrayIsReadInOrder) {
  const std::string data("\x01\x00\x02\x00\x03\x00\x04\x00\x05\x00\x06\x01", 12);
  for (const int version : {1, 2, 3}) {
    const auto array = ParseHalfArray(Npy(kGood, data, version), "x.npy");
    ASSERT_THAT(array, IsOk());
    EXPECT_THAT(array->shape, ElementsAre(2, 3));
    EXPECT_THAT(array->data, ElementsAre(1, 2, 3, 4, 5, 0x106));
  }
}

TEST(Npy, ShapesOfEveryRankAreRead) {
  const auto shape = [](const std::string& tuple) {
    const auto header = ParseNpyHeader(Npy("{'descr': '<f2', 'fortran_order': False, 'shape': " + tuple + "}", ""));
    EXPECT_THAT(header, IsOk());
    return header.ok() ? header->shape : std::vector<uint64_t>{};
  };
  EXPECT_THAT(shape("()"), IsEmpty());
  EXPECT_THAT(shape("(7,)"), ElementsAre(7));
  EXPECT_THAT(shape("(7, 0)"), ElementsAre(7, 0));
  EXPECT_THAT(shape("(1,2,3,4,5,6,7,8)"), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST(Npy, KeysMayComeInAnyOrder) {
  const auto header = ParseNpyHeader(Npy("{\"shape\": (4,), \"fortran_order\": True, \"descr\": \"<f4\"}", ""));
  ASSERT_THAT(header, IsOk());
  EXPECT_EQ(header->descr, "<f4");
  EXPECT_TRUE(header->fortran_order);
}

TEST(Npy, DamagedHeadersAreRefused) {
  const auto refused = [](const std::string& bytes, const char* text) {
    EXPECT_THAT(ParseNpyHeader(bytes), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text))) << text;
  };
  refused("", "not a .npy file");
  refused("\x93NUMPX\x01\x00\x01\x00{", "not a .npy file");
  refused(Npy(kGood, "", 4), "version 4");
  const std::string whole = Npy(kGood, "");
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(ParseNpyHeader(whole.substr(0, size)).ok()) << size;
  }
  refused(Npy("", ""), "no dictionary");
  refused(Npy("{}", ""), "missing");
  refused(Npy("{'descr': '<f2', 'shape': (2,)}", ""), "missing");
  refused(Npy("{'descr': 3}", ""), "descr");
  refused(Npy("{'fortran_order': 0}", ""), "fortran_order");
  refused(Npy("{'shape': 3}", ""), "shape");
  refused(Npy("{'shape': (3", ""), "shape");
  refused(Npy("{'shape': (-3,)}", ""), "shape");
  refused(Npy("{'shape': (1,1,1,1,1,1,1,1,1)}", ""), "shape");
  refused(Npy("{'shape': (99999999999999999999,)}", ""), "shape");
  refused(Npy("{'other': 1}", ""), "unknown key 'other'");
  refused(Npy("{'descr': '<f2' 'shape': (2,)}", ""), "no end");
  refused(Npy("{'descr': '<f2', 'fortran_order': False, 'shape': (2,)", ""), "no end");
}

TEST(Npy, OtherTypesOrdersAndSizesAreRefused) {
  const auto refused = [](const std::string& dictionary, const std::string& data, const char* text) {
    EXPECT_THAT(ParseHalfArray(Npy(dictionary, data), "x.npy"),
                StatusIs(absl::StatusCode::kInvalidArgument, ::testing::AllOf(HasSubstr("x.npy"), HasSubstr(text))));
  };
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", "abcd", "'<f4'");
  refused("{'descr': '>f2', 'fortran_order': False, 'shape': (1,)}", "ab", "'>f2'");
  refused("{'descr': '<f2', 'fortran_order': True, 'shape': (1,)}", "ab", "Fortran");
  refused(kGood, std::string(11, 'x'), "11 bytes of data; the shape has 12");
  refused(kGood, std::string(13, 'x'), "13 bytes of data");
  refused("{'descr': '<f2', 'fortran_order': False, 'shape': (1099511627776, 1099511627776)}", "", "overflows");
}

TEST(Npy, MissingAndOversizedFilesAreNamed) {
  EXPECT_THAT(ReadFile("no/such/file", 100), StatusIs(absl::StatusCode::kNotFound, HasSubstr("no/such/file")));
  EXPECT_THAT(ReadFile(__FILE__, 10), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("larger than 10")));
  const auto text = ReadFile(__FILE__, 1 << 20);
  ASSERT_THAT(text, IsOk());
  EXPECT_THAT(*text, HasSubstr("SPDX"));
}

}  // namespace
}  // namespace ctkvr::cli

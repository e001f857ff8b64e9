// SPDX-License-Identifier: Apache-2.0
//
// The test vectors of the storage format right through the operations: what WriteTokens stores and GatherRows fetches
// is, byte for byte, what tests/golden/rows.json says; and decoded rows are its floats, bit for bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/rotation.h"
#include "tests/golden/golden_rows.h"

namespace ctkvr::cpu {
namespace {

using ::testing::ElementsAreArray;
using testing::GoldenCase;
using testing::GoldenToken;

// The tokens of a case in a page, from the fifth place on.
class StoredCase {
 public:
  static constexpr uint32_t kFirst = 5;

  StoredCase(Backend& backend, const GoldenCase& golden, uint32_t first_planes)
      : backend_(backend), stream_(*backend.NewStream()), golden_(golden) {
    view_.layout = MakePageLayout(golden.format, golden.head_dim, golden.value_dim, first_planes);
    page_.resize(view_.layout.page_bytes);
    page_pointer_ = page_.data();
    view_.pages = &page_pointer_;
    sketch_.resize(view_.layout.sketch_bytes);
    sketch_pointer_ = sketch_.data();
    view_.sketches = &sketch_pointer_;
    if (KeysAreCoded(golden.format) && !golden.keys_coded) {
      raw_page_.resize(kPageTokens * golden.head_dim * DTypeBytes(golden.raw_dtype));
      raw_pointer_ = raw_page_.data();
      view_.raw_pages = &raw_pointer_;
      view_.raw_dtype = golden.raw_dtype;
    }
    signs_ = RotationSigns(golden.head_dim, golden.rotation_seed);
    view_.signs = signs_.data();
    view_.mean = golden.mean.data();
  }

  absl::Status Write() {
    std::vector<float> keys, values;
    for (const GoldenToken& token : golden_.tokens) {
      keys.insert(keys.end(), token.key.begin(), token.key.end());
      values.insert(values.end(), token.value.begin(), token.value.end());
    }
    int64_t bad_key = 0, bad_value = 0;
    const WriteTokensItem item{.view = view_,
                               .first_position = kFirst,
                               .count = Count(),
                               .keys = reinterpret_cast<const std::byte*>(keys.data()),
                               .values = reinterpret_cast<const std::byte*>(values.data()),
                               .key_stride = golden_.head_dim * sizeof(float),
                               .value_stride = golden_.value_dim * sizeof(float),
                               .dtype = DType::kF32,
                               .bad_key_element = &bad_key,
                               .bad_value_element = &bad_value};
    const absl::Status status = backend_.WriteTokens(*stream_, {&item, 1});
    EXPECT_EQ(bad_key, -1);
    EXPECT_EQ(bad_value, -1);
    view_.length = kFirst + Count();
    return status;
  }

  absl::Status Gather(RowFormat format, std::vector<std::byte>* keys, std::vector<std::byte>* values) {
    const size_t element = format == RowFormat::kStorage ? 0 : sizeof(float);
    keys->resize(Count() * (element == 0 ? golden_.tokens[0].key_row.size() : golden_.head_dim * element));
    values->resize(Count() * (element == 0 ? golden_.tokens[0].value_row.size() : golden_.value_dim * element));
    std::vector<uint32_t> tokens(Count());
    std::iota(tokens.begin(), tokens.end(), kFirst);
    const uint32_t count = Count();
    uint64_t overflow = 1;
    const GatherRowsItem item{.view = view_,
                              .tokens = tokens.data(),
                              .count = &count,
                              .count_max = count,
                              .row_format = format,
                              .keys = keys->data(),
                              .values = values->data(),
                              .overflow = &overflow};
    const absl::Status status = backend_.GatherRows(*stream_, {&item, 1});
    EXPECT_EQ(overflow, 0u);
    return status;
  }

 private:
  uint32_t Count() const { return static_cast<uint32_t>(golden_.tokens.size()); }

  Backend& backend_;
  std::unique_ptr<Stream> stream_;
  const GoldenCase& golden_;
  HeadView view_;
  std::vector<std::byte> page_, raw_page_, sketch_;
  std::byte* page_pointer_ = nullptr;
  std::byte* sketch_pointer_ = nullptr;
  std::byte* raw_pointer_ = nullptr;
  std::vector<float> signs_;
};

std::vector<std::byte> FloatBytes(const std::vector<float>& floats) {
  std::vector<std::byte> bytes(floats.size() * sizeof(float));
  std::memcpy(bytes.data(), floats.data(), bytes.size());
  return bytes;
}

class StoredRowsTest : public ::testing::TestWithParam<const char*> {};

std::vector<const char*> TablesPresent() {
  std::vector<const char*> names;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    if (FindCpuKernels(name) != nullptr) names.push_back(name);
  }
  return names;
}
INSTANTIATE_TEST_SUITE_P(Tables, StoredRowsTest, ::testing::ValuesIn(TablesPresent()),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(StoredRowsTest, RowsAreThoseOfTheTestVectors) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend(*FindCpuKernels(GetParam()));
  for (const GoldenCase& golden : testing::ReadGoldenRows()) {
    for (uint32_t first_planes : {1u, 2u}) {
      SCOPED_TRACE(golden.name + " first_planes " + std::to_string(first_planes));
      StoredCase stored(*backend, golden, first_planes);
      ASSERT_TRUE(stored.Write().ok());
      std::vector<std::byte> expected_keys, expected_values, decoded_keys, decoded_values;
      const auto add = [](std::vector<std::byte>& to, const std::vector<std::byte>& row) {
        to.insert(to.end(), row.begin(), row.end());
      };
      for (const GoldenToken& token : golden.tokens) {
        add(expected_keys, token.key_row);
        add(expected_values, token.value_row);
        add(decoded_keys, FloatBytes(token.decoded_key));
        add(decoded_values, FloatBytes(token.decoded_value));
      }
      std::vector<std::byte> keys, values;
      ASSERT_TRUE(stored.Gather(RowFormat::kStorage, &keys, &values).ok());
      EXPECT_THAT(keys, ElementsAreArray(expected_keys));
      EXPECT_THAT(values, ElementsAreArray(expected_values));
      ASSERT_TRUE(stored.Gather(RowFormat::kF32, &keys, &values).ok());
      EXPECT_THAT(keys, ElementsAreArray(decoded_keys));
      EXPECT_THAT(values, ElementsAreArray(decoded_values));
    }
  }
}

}  // namespace
}  // namespace ctkvr::cpu

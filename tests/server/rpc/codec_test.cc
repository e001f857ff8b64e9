// SPDX-License-Identifier: Apache-2.0
//
// Proves that calls decode to what their bytes say, that every limit holds at the limit and not one above, and that
// each refusal names field, value and limit. codec_fuzz_test.cc goes on with random mutations.

#include "server/rpc/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/server/rpc/messages.h"
#include "tests/testing/status_matchers.h"

namespace ctkvr::rpc {
namespace {

using ::ctkvr::testing::IsOk;
using ::ctkvr::testing::kHeadDim;
using ::ctkvr::testing::kKvHeads;
using ::ctkvr::testing::kQHeads;
using ::ctkvr::testing::kValueDim;
using ::ctkvr::testing::MakeAppend;
using ::ctkvr::testing::MakeChunk;
using ::ctkvr::testing::MakeDecode;
using ::ctkvr::testing::MakeQuery;
using ::ctkvr::testing::MakeRetrieve;
using ::ctkvr::testing::MakeTensor;
using ::ctkvr::testing::StatusIs;
using ::testing::HasSubstr;

auto IsInvalid(const std::string& text) { return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)); }
auto IsNotServed(const std::string& text) { return StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(text)); }

const char* Bytes(std::span<const std::byte> span) { return reinterpret_cast<const char*>(span.data()); }

// ---- Sessions ----------------------------------------------------------------------------------------------------

TEST(DecodeSessionRefTest, FieldsAreTaken) {
  v1::SessionRef message;
  message.set_session_id("a");
  message.set_epoch(7);
  message.set_fingerprint("f");
  const auto ref = DecodeSessionRef(message);
  ASSERT_THAT(ref, IsOk());
  EXPECT_EQ(ref->id, "a");
  EXPECT_EQ(ref->epoch, 7u);
  EXPECT_EQ(ref->fingerprint, "f");
}

TEST(DecodeSessionRefTest, LengthsHoldAtTheLimitAndNotOneAbove) {
  v1::SessionRef message;
  EXPECT_THAT(DecodeSessionRef(message), IsInvalid("session.session_id is missing"));
  message.set_session_id(std::string(128, 'x'));
  message.set_fingerprint(std::string(256, 'x'));
  EXPECT_THAT(DecodeSessionRef(message), IsOk());
  message.set_session_id(std::string(129, 'x'));
  EXPECT_THAT(DecodeSessionRef(message), IsInvalid("session.session_id bytes is 129; the limit is 128"));
  message.set_session_id("x");
  message.set_fingerprint(std::string(257, 'x'));
  EXPECT_THAT(DecodeSessionRef(message), IsInvalid("session.fingerprint bytes is 257; the limit is 256"));
}

TEST(DecodeNewSessionIdTest, EmptyIsLeftToTheEngine) {
  EXPECT_EQ(*DecodeNewSessionId(""), "");
  EXPECT_THAT(DecodeNewSessionId(std::string(128, 'x')), IsOk());
  EXPECT_THAT(DecodeNewSessionId(std::string(129, 'x')), IsInvalid("session_id bytes is 129; the limit is 128"));
}

// ---- Chunks ------------------------------------------------------------------------------------------------------

TEST(DecodeChunkTest, ShapesAreReadAndBytesAreViewedInPlace) {
  v1::Chunk message = MakeChunk(1, 5, 3);
  *message.mutable_queries() = MakeTensor({2, kQHeads, kHeadDim}, 1);
  const auto chunk = DecodeChunk(message);
  ASSERT_THAT(chunk, IsOk());
  EXPECT_EQ(chunk->layer, 1u);
  EXPECT_EQ(chunk->first_position, 5u);
  EXPECT_EQ(chunk->tokens, 3u);
  EXPECT_EQ(chunk->query_positions, 2u);
  EXPECT_EQ(chunk->dtype, DType::kF32);
  EXPECT_EQ(chunk->kv_heads, kKvHeads);
  EXPECT_EQ(chunk->head_dim, kHeadDim);
  EXPECT_EQ(chunk->value_dim, kValueDim);
  EXPECT_EQ(chunk->q_heads, kQHeads);
  EXPECT_EQ(Bytes(chunk->keys), message.keys().data().data());
  EXPECT_EQ(chunk->keys.size(), message.keys().data().size());
  EXPECT_EQ(Bytes(chunk->values), message.values().data().data());
  EXPECT_EQ(Bytes(chunk->queries), message.queries().data().data());
}

TEST(DecodeChunkTest, ElementTypesAreRead) {
  for (v1::DType dtype : {v1::DTYPE_F16, v1::DTYPE_BF16}) {
    v1::Chunk message = MakeChunk(0, 0, 2);
    for (v1::Tensor* tensor : {message.mutable_keys(), message.mutable_values()}) {
      tensor->set_dtype(dtype);
      tensor->mutable_data()->resize(tensor->data().size() / 2);
    }
    const auto chunk = DecodeChunk(message);
    ASSERT_THAT(chunk, IsOk());
    EXPECT_EQ(chunk->dtype, dtype == v1::DTYPE_F16 ? DType::kF16 : DType::kBF16);
  }
}

struct Break {
  const char* name;
  std::function<void(v1::Chunk&)> apply;
  const char* text;
};
std::ostream& operator<<(std::ostream& out, const Break& b) { return out << b.name; }

class BadChunkTest : public ::testing::TestWithParam<Break> {};

TEST_P(BadChunkTest, IsRefused) {
  v1::Chunk message = MakeChunk(0, 0, 2);
  *message.mutable_queries() = MakeTensor({2, kQHeads, kHeadDim}, 1);
  ASSERT_THAT(DecodeChunk(message), IsOk());
  GetParam().apply(message);
  EXPECT_THAT(DecodeChunk(message), IsInvalid(GetParam().text));
}

void Reshape(v1::Tensor* tensor, std::initializer_list<uint32_t> dims) {
  tensor->clear_dims();
  for (uint32_t dim : dims) tensor->add_dims(dim);
}

INSTANTIATE_TEST_SUITE_P(
    All, BadChunkTest,
    ::testing::Values(
        Break{"NoKeys", [](v1::Chunk& c) { c.clear_keys(); }, "chunk.keys is missing"},
        Break{"NoValues", [](v1::Chunk& c) { c.clear_values(); }, "chunk.values is missing"},
        Break{"NoDType", [](v1::Chunk& c) { c.mutable_keys()->clear_dtype(); }, "chunk.keys.dtype is missing"},
        Break{"UnknownDType", [](v1::Chunk& c) { c.mutable_keys()->set_dtype(static_cast<v1::DType>(9)); },
              "chunk.keys.dtype is 9; the known values are 0 to 3"},
        Break{"NegativeDType", [](v1::Chunk& c) { c.mutable_values()->set_dtype(static_cast<v1::DType>(-1)); },
              "chunk.values.dtype is -1"},
        Break{"TwoDims",
              [](v1::Chunk& c) {
                Reshape(c.mutable_keys(), {2, 64});
              },
              "chunk.keys.dims has 2 entries"},
        Break{"FourDims",
              [](v1::Chunk& c) {
                Reshape(c.mutable_keys(), {1, 2, 2, 32});
              },
              "chunk.keys.dims has 4 entries; it takes 3"},
        Break{"OneByteShort", [](v1::Chunk& c) { c.mutable_keys()->mutable_data()->pop_back(); },
              "chunk.keys.data has 511 bytes; dims [2, 2, 32] of f32 take 512"},
        Break{"OneByteLong", [](v1::Chunk& c) { c.mutable_values()->mutable_data()->push_back('x'); },
              "chunk.values.data has 257 bytes; dims [2, 2, 16] of f32 take 256"},
        Break{"ProductOverflows",
              [](v1::Chunk& c) {
                Reshape(c.mutable_keys(), {4294967295u, 4294967295u, 4294967295u});
              },
              "chunk.keys.dims is [4294967295, 4294967295, 4294967295]; its bytes do not fit 64 bits"},
        Break{"ProductWrapsToTheRightSize",  // 2^31 * 2^31 * 2^2 = 2^64: 0 in 64 bits
              [](v1::Chunk& c) {
                Reshape(c.mutable_keys(), {1u << 31, 1u << 31, 1});
                c.mutable_keys()->clear_data();
              },
              "do not fit 64 bits"},
        Break{"NoTokens",
              [](v1::Chunk& c) {
                Reshape(c.mutable_keys(), {0, 2, 32});
                c.mutable_keys()->clear_data();
              },
              "chunk.keys.dims[0] is 0; it must be at least 1"},
        Break{"ZeroTimesHuge",
              [](v1::Chunk& c) {
                Reshape(c.mutable_keys(), {0, 4294967295u, 4294967295u});
                c.mutable_keys()->clear_data();
              },
              "chunk.keys.dims[0] is 0"},
        Break{"OtherTokensInValues",
              [](v1::Chunk& c) {
                *c.mutable_values() = MakeTensor({3, kKvHeads, kValueDim}, 1);
              },
              "chunk.values.dims[0] is 3; it must equal keys.dims[0], which is 2"},
        Break{"OtherHeadsInValues",
              [](v1::Chunk& c) {
                *c.mutable_values() = MakeTensor({2, 1, kValueDim}, 1);
              },
              "chunk.values.dims[1] is 1; it must equal keys.dims[1], which is 2"},
        Break{"OtherTypeInValues",
              [](v1::Chunk& c) {
                c.mutable_values()->set_dtype(v1::DTYPE_F16);
                c.mutable_values()->mutable_data()->resize(128);
              },
              "chunk.values.dtype is f16; it must equal that of keys, which is f32"},
        Break{"OtherTypeInQueries",
              [](v1::Chunk& c) {
                c.mutable_queries()->set_dtype(v1::DTYPE_BF16);
                c.mutable_queries()->mutable_data()->resize(512);
              },
              "chunk.queries.dtype is bf16"},
        Break{"MoreQueriesThanTokens",
              [](v1::Chunk& c) {
                *c.mutable_queries() = MakeTensor({3, kQHeads, kHeadDim}, 1);
              },
              "chunk.queries.dims[0] is 3; the limit is 2"},
        Break{"OtherHeadDimInQueries",
              [](v1::Chunk& c) {
                *c.mutable_queries() = MakeTensor({2, kQHeads, 40}, 1);
              },
              "chunk.queries.dims[2] is 40; it must equal keys.dims[2], which is 32"},
        Break{"EmptyQueries", [](v1::Chunk& c) { c.mutable_queries()->Clear(); }, "chunk.queries.dtype is missing"}),
    [](const auto& instance) { return instance.param.name; });

// One of the three dims at its limit and one above, the others small.
TEST(DecodeChunkTest, DimsHoldAtTheLimitAndNotOneAbove) {
  const auto decode = [](uint32_t tokens, uint32_t heads, uint32_t dim) {
    v1::Chunk message = MakeChunk(0, 0, 1);
    *message.mutable_keys() = MakeTensor({tokens, heads, dim}, 1);
    *message.mutable_values() = MakeTensor({tokens, heads, 1}, 1);
    return DecodeChunk(message).status();
  };
  EXPECT_THAT(decode(16384, 1, 1), IsOk());
  EXPECT_THAT(decode(16385, 1, 1), IsInvalid("chunk.keys.dims[0] is 16385; the limit is 16384"));
  EXPECT_THAT(decode(1, 128, 1), IsOk());
  EXPECT_THAT(decode(1, 129, 1), IsInvalid("chunk.keys.dims[1] is 129; the limit is 128"));
  EXPECT_THAT(decode(1, 1, 256), IsOk());
  EXPECT_THAT(decode(1, 1, 257), IsInvalid("chunk.keys.dims[2] is 257; the limit is 256"));
}

TEST(DecodeChunkTest, TagsAreNotServed) {
  v1::Chunk message = MakeChunk(0, 0, 1);
  message.add_segments(0);
  EXPECT_THAT(DecodeChunk(message), IsNotServed("chunk.segments"));
  message.clear_segments();
  message.add_weights(1.5f);
  message.add_classes(300);
  const auto chunk = DecodeChunk(message);
  ASSERT_THAT(chunk.status(), IsOk());
  EXPECT_EQ(std::vector<float>(chunk->weights.begin(), chunk->weights.end()), std::vector<float>{1.5f});
  EXPECT_EQ(std::vector<uint32_t>(chunk->classes.begin(), chunk->classes.end()), std::vector<uint32_t>{300});
}

// ---- Append ------------------------------------------------------------------------------------------------------

TEST(DecodeAppendTest, AChunkMustBeThere) {
  v1::AppendRequest request = MakeAppend("a", 0, 0, 2);
  EXPECT_THAT(DecodeAppend(request), IsOk());
  request.clear_chunk();
  EXPECT_THAT(DecodeAppend(request), IsInvalid("chunk is missing"));
}

TEST(DecodeAppendTest, TheChecksumCoversKeysValuesAndQueriesInThisOrder) {
  v1::AppendRequest request = MakeAppend("a", 0, 0, 2);
  request.set_checksum(ctkvr::testing::Checksum(request.chunk()));
  EXPECT_THAT(DecodeAppend(request), IsOk());
  *request.mutable_chunk()->mutable_queries() = MakeTensor({2, kQHeads, kHeadDim}, 1);
  EXPECT_THAT(DecodeAppend(request), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("checksum is ")));
  request.set_checksum(ctkvr::testing::Checksum(request.chunk()));
  EXPECT_THAT(DecodeAppend(request), IsOk());
}

TEST(DecodeAppendTest, ASingleChangedBitAnywhereIsDataLoss) {
  v1::AppendRequest good = MakeAppend("a", 0, 0, 2);
  *good.mutable_chunk()->mutable_queries() = MakeTensor({1, kQHeads, kHeadDim}, 1);
  good.set_checksum(ctkvr::testing::Checksum(good.chunk()));
  for (int part = 0; part < 3; ++part) {
    v1::AppendRequest request = good;
    v1::Tensor* tensors[] = {request.mutable_chunk()->mutable_keys(), request.mutable_chunk()->mutable_values(),
                             request.mutable_chunk()->mutable_queries()};
    tensors[part]->mutable_data()->back() ^= 1;
    EXPECT_THAT(DecodeAppend(request), StatusIs(absl::StatusCode::kDataLoss)) << part;
  }
}

TEST(DecodeAppendTest, ChecksumZeroIsNotCompared) {
  v1::AppendRequest request = MakeAppend("a", 0, 0, 2);
  request.set_checksum(0);
  EXPECT_THAT(DecodeAppend(request), IsOk());
}

TEST(DecodeAppendTest, WrongSizesAreReportedBeforeAWrongChecksum) {
  v1::AppendRequest request = MakeAppend("a", 0, 0, 2);
  request.set_checksum(1);
  request.mutable_chunk()->mutable_keys()->mutable_data()->pop_back();
  EXPECT_THAT(DecodeAppend(request), IsInvalid("chunk.keys.data"));
}

// ---- Queries and answers -----------------------------------------------------------------------------------------

TEST(DecodeQueryTest, EveryFieldIsTaken) {
  v1::Query message = MakeQuery(1, 9, 3);
  message.mutable_selection()->set_k_tokens(5);
  message.set_local_begin(0);
  message.set_local_sinks(2);
  message.set_cache_version(3);
  const auto query = DecodeQuery(message, {.mode = AnswerMode::kRows});
  ASSERT_THAT(query, IsOk());
  EXPECT_EQ(query->layer, 1u);
  EXPECT_EQ(query->position, 9u);
  EXPECT_EQ(query->positions, 3u);
  EXPECT_EQ(query->q_heads, kQHeads);
  EXPECT_EQ(query->head_dim, kHeadDim);
  EXPECT_EQ(query->selection.k_tokens, 5u);
  EXPECT_EQ(query->local_begin, 0u);
  EXPECT_EQ(query->local_sinks, 2u);
  EXPECT_EQ(query->cache_version, 3u);
  EXPECT_EQ(query->answer.mode, AnswerMode::kRows);
  EXPECT_EQ(Bytes(query->queries), message.queries().data().data());
}

TEST(DecodeQueryTest, NoLocalBeginIsNotZero) { EXPECT_EQ(DecodeQuery(MakeQuery(0, 0), {})->local_begin, std::nullopt); }

TEST(DecodeQueryTest, DimsHoldAtTheLimitAndNotOneAbove) {
  const auto decode = [](uint32_t positions, uint32_t heads, uint32_t dim) {
    v1::Query message = MakeQuery(0, 0);
    *message.mutable_queries() = MakeTensor({positions, heads, dim}, 1);
    return DecodeQuery(message, {}).status();
  };
  EXPECT_THAT(decode(64, 1, 1), IsOk());
  EXPECT_THAT(decode(65, 1, 1), IsInvalid("query.queries.dims[0] is 65; the limit is 64"));
  EXPECT_THAT(decode(1, 256, 1), IsOk());
  EXPECT_THAT(decode(1, 257, 1), IsInvalid("query.queries.dims[1] is 257; the limit is 256"));
  EXPECT_THAT(decode(1, 1, 257), IsInvalid("query.queries.dims[2] is 257; the limit is 256"));
}

TEST(DecodeAnswerOptionsTest, UnspecifiedMeansScoresInF16) {
  const auto options = DecodeAnswerOptions({});
  ASSERT_THAT(options, IsOk());
  EXPECT_EQ(options->mode, AnswerMode::kScores);
  EXPECT_EQ(options->row_format, RowFormat::kF16);
}

TEST(DecodeAnswerOptionsTest, AttentionComesInF32UnlessAskedOtherwise) {
  v1::AnswerOptions message;
  message.set_mode(v1::ANSWER_MODE_ATTENTION);
  EXPECT_EQ(DecodeAnswerOptions(message)->row_format, RowFormat::kF32);
  message.set_row_format(v1::ROW_FORMAT_F16);
  EXPECT_EQ(DecodeAnswerOptions(message)->row_format, RowFormat::kF16);
}

TEST(DecodeAnswerOptionsTest, EveryServedValueIsTaken) {
  v1::AnswerOptions message;
  message.set_known_code_generation(3);
  const std::pair<v1::AnswerMode, AnswerMode> modes[] = {{v1::ANSWER_MODE_IDS, AnswerMode::kIds},
                                                         {v1::ANSWER_MODE_SCORES, AnswerMode::kScores},
                                                         {v1::ANSWER_MODE_ROWS, AnswerMode::kRows},
                                                         {v1::ANSWER_MODE_NEW_ROWS, AnswerMode::kNewRows},
                                                         {v1::ANSWER_MODE_ATTENTION, AnswerMode::kAttention}};
  for (const auto& [wire, mode] : modes) {
    message.set_mode(wire);
    EXPECT_EQ(DecodeAnswerOptions(message)->mode, mode);
  }
  const std::pair<v1::RowFormat, RowFormat> formats[] = {{v1::ROW_FORMAT_F32, RowFormat::kF32},
                                                         {v1::ROW_FORMAT_F16, RowFormat::kF16},
                                                         {v1::ROW_FORMAT_BF16, RowFormat::kBF16},
                                                         {v1::ROW_FORMAT_STORAGE, RowFormat::kStorage}};
  for (const auto& [wire, format] : formats) {
    message.set_row_format(wire);
    EXPECT_EQ(DecodeAnswerOptions(message)->row_format, format);
  }
  EXPECT_EQ(DecodeAnswerOptions(message)->known_code_generation, 3u);
}

TEST(DecodeAnswerOptionsTest, TheRemainderComesAsFloatsUnlessAHalfIsAskedFor) {
  v1::AnswerOptions message;
  EXPECT_FALSE(DecodeAnswerOptions(message)->remainder);
  message.set_remainder(true);
  for (const auto& [format, dtype] : {std::pair{v1::ROW_FORMAT_UNSPECIFIED, DType::kF32},
                                      {v1::ROW_FORMAT_F32, DType::kF32},
                                      {v1::ROW_FORMAT_STORAGE, DType::kF32},
                                      {v1::ROW_FORMAT_F16, DType::kF16},
                                      {v1::ROW_FORMAT_BF16, DType::kBF16}}) {
    message.set_row_format(format);
    EXPECT_TRUE(DecodeAnswerOptions(message)->remainder);
    EXPECT_EQ(DecodeAnswerOptions(message)->remainder_dtype, dtype);
  }
}

TEST(DecodeAnswerOptionsTest, UnknownNumbersAreInvalid) {
  v1::AnswerOptions message;
  message.set_mode(static_cast<v1::AnswerMode>(6));
  EXPECT_THAT(DecodeAnswerOptions(message), IsInvalid("answer.mode is 6; the known values are 0 to 5"));
  message.Clear();
  message.set_row_format(static_cast<v1::RowFormat>(-2));
  EXPECT_THAT(DecodeAnswerOptions(message), IsInvalid("answer.row_format is -2; the known values are 0 to 4"));
}

// ---- Batches -----------------------------------------------------------------------------------------------------

TEST(DecodeRetrieveTest, ItemsHoldAtTheLimitAndNotOneAbove) {
  v1::RetrieveRequest request;
  EXPECT_THAT(DecodeRetrieve(request).status(), IsInvalid("items is 0; it must be at least 1"));
  for (int i = 0; i < 256; ++i) *request.add_items() = MakeRetrieve("a", 0, 0).items(0);
  EXPECT_THAT(DecodeRetrieve(request).status(), IsOk());
  *request.add_items() = request.items(0);
  EXPECT_THAT(DecodeRetrieve(request).status(), IsInvalid("items is 257; the limit is 256"));
}

TEST(DecodeRetrieveTest, TheOnlyItemsErrorIsTheCalls) {
  v1::RetrieveRequest request = MakeRetrieve("a", 0, 0);
  request.mutable_items(0)->clear_query();
  EXPECT_THAT(DecodeRetrieve(request).status(), IsInvalid("items[0].query is missing"));
}

TEST(DecodeRetrieveTest, OneOfSeveralBadItemsLeavesTheOthers) {
  v1::RetrieveRequest request;
  for (uint32_t i = 0; i < 3; ++i) *request.add_items() = MakeRetrieve("a", 0, i).items(0);
  request.mutable_items(1)->mutable_query()->mutable_queries()->mutable_data()->pop_back();
  const auto decoded = DecodeRetrieve(request);
  ASSERT_THAT(decoded.status(), IsOk());
  ASSERT_EQ(decoded->steps.size(), 2u);
  EXPECT_THAT(decoded->items, ::testing::ElementsAre(0, 2));
  EXPECT_EQ(decoded->steps[1].query->position, 2u);
  EXPECT_THAT(decoded->statuses[0], IsOk());
  EXPECT_THAT(decoded->statuses[1], IsInvalid("items[1].query.queries.data"));
  EXPECT_THAT(decoded->statuses[2], IsOk());
}

TEST(DecodeDecodeTest, AnItemHasChunkQueryOrBoth) {
  v1::DecodeRequest request = MakeDecode("a", 0, 0, 1);
  *request.add_items() = request.items(0);
  *request.add_items() = request.items(0);
  request.mutable_items(1)->clear_chunk();
  request.mutable_items(2)->clear_query();
  const auto steps = DecodeDecode(request);
  ASSERT_THAT(steps.status(), IsOk());
  EXPECT_TRUE((*steps)[0].chunk && (*steps)[0].query);
  EXPECT_TRUE(!(*steps)[1].chunk && (*steps)[1].query);
  EXPECT_TRUE((*steps)[2].chunk && !(*steps)[2].query);
  request.mutable_items(2)->clear_chunk();
  EXPECT_THAT(DecodeDecode(request).status(), IsInvalid("items[2] has neither chunk nor query"));
}

TEST(DecodeDecodeTest, OneMalformedItemFailsTheMessage) {
  v1::DecodeRequest request = MakeDecode("a", 0, 0, 1);
  *request.add_items() = request.items(0);
  request.mutable_items(1)->mutable_session()->clear_session_id();
  EXPECT_THAT(DecodeDecode(request).status(), IsInvalid("items[1].session.session_id is missing"));
}

TEST(DecodeMaintainLayersTest, CountHoldsAtTheLimit) {
  v1::MaintainSessionRequest request;
  EXPECT_TRUE(DecodeMaintainLayers(request)->empty());
  for (uint32_t i = 0; i < 256; ++i) request.add_layers(i);
  EXPECT_EQ(DecodeMaintainLayers(request)->size(), 256u);
  request.add_layers(0);
  EXPECT_THAT(DecodeMaintainLayers(request).status(), IsInvalid("layers count is 257; the limit is 256"));
}

TEST(DecodeListPageTest, SizesHoldAtTheLimit) {
  v1::ListSessionsRequest request;
  EXPECT_EQ(DecodeListPage(request)->size, 100u);
  request.set_page_size(1000);
  EXPECT_EQ(DecodeListPage(request)->size, 1000u);
  request.set_page_size(1001);
  EXPECT_THAT(DecodeListPage(request).status(), IsInvalid("page_size is 1001; the limit is 1000"));
  request.set_page_size(1);
  request.set_page_token(std::string(129, 'x'));
  EXPECT_THAT(DecodeListPage(request).status(), IsInvalid("page_token bytes is 129; the limit is 128"));
}

}  // namespace
}  // namespace ctkvr::rpc

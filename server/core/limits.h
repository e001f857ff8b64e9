// SPDX-License-Identifier: Apache-2.0
//
// Every limit the service checks at the door, with its reason. Nothing else in the code names a bound of its own.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace ctkvr::limits {

// Ids appear in logs, map keys and replies.
inline constexpr size_t kSessionIdBytesMax = 128;
inline constexpr size_t kFingerprintBytesMax = 256;
inline constexpr size_t kCentroidSetNameBytesMax = 64;

// Geometry: the largest public models, with room.
inline constexpr uint32_t kLayersMax = 256;
inline constexpr uint32_t kQHeadsMax = 256;
inline constexpr uint32_t kKvHeadsMax = 128;
inline constexpr uint32_t kGroupHeadsMax = 16;  // registers of the scan kernels; equals ctkvr::kGroupHeadsMax
inline constexpr uint32_t kHeadDimMin = 16;
inline constexpr uint32_t kHeadDimMax = 256;     // what the conformance cases cover
inline constexpr uint32_t kHeadDimMultiple = 8;  // a plane is whole bytes
inline constexpr uint32_t kTokenLimitMax = 4u << 20;

// Products of two such numbers, summed over kHeadDimMax, stay far inside float32: scores are always finite.
inline constexpr double kMagnitudeMax = 1e15;
// 2-norm of keys to be coded: half the largest binary16, so that key less mean, rotated, always has scales that
// binary16 holds.
inline constexpr double kCodedKeyNormMax = 32752;
inline constexpr float kSoftmaxScaleMax = 1e4f;
inline constexpr float kSinkLogitMax = 1e6f;

// One call.
inline constexpr uint32_t kTokensMax = 8192;  // k_tokens
inline constexpr uint32_t kCandidateTokensMax = 65536;
inline constexpr uint32_t kQueryPositionsMax = 64;        // speculative drafts
inline constexpr uint32_t kItemsMax = 256;                // sessions a batch
inline constexpr uint32_t kAppendTokensMax = 16384;       // a chunk
inline constexpr uint64_t kReplyBytesMax = 256ull << 20;  // rows of one reply
inline constexpr uint64_t kMessageBytesMax = 64ull << 20;

// Slots of a worker's row cache, a layer and set: they travel in 16 bits, and one value means none.
inline constexpr uint32_t kCacheSlotsMax = 65535;
// Host memory for the slot tables and tags of all sessions: 90 sessions of Llama-3-8B with 2,048 slots.
inline constexpr uint64_t kSlotTableBytesMax = 1ull << 30;
// What the program, its libraries and the messages of calls that run are taken to need; a server of 8 lanes was seen
// with less.
inline constexpr uint64_t kProgramBytes = 1ull << 30;

// Query centroids a KV head.
inline constexpr uint32_t kCentroidsMax = 8192;
inline constexpr uint32_t kListTokensMax = 8192;
// That one adjustment adds to a KV head: so many spare elements every set has.
inline constexpr uint32_t kAdjustedCentroidsMax = 64;
// Retrieved positions between two adjustments: fewer would keep a lane at building lists.
inline constexpr uint32_t kAdjustTokensMin = 16;

// Tokens a key cluster: fewer cost too much memory (and a byte names the clusters of a block), more estimate no better
// than none. 16: half the memory of 8, 0.003 more error of the output (kernels/cluster_ops.h).
inline constexpr uint32_t kTokensPerClusterMin = 4;
inline constexpr uint32_t kTokensPerClusterMax = 128;
// Where a client says nothing and keys are coded: k8v4 stays within 22.5 % of float32 at head_dim 128, which 16 exceed.
inline constexpr uint32_t kTokensPerClusterDefault = 17;

// Leases, seconds.
inline constexpr uint32_t kLeaseSecondsMin = 1;
inline constexpr uint32_t kLeaseSecondsMax = 86400;
inline constexpr uint32_t kLeaseSecondsDefault = 600;

// The server as a whole.
inline constexpr uint32_t kSessionsMax = 100000;
inline constexpr uint32_t kQueueItemsDefault = 1024;  // waiting calls a lane
inline constexpr uint32_t kListSessionsPageMax = 1000;
inline constexpr size_t kTombstonesMax = 4096;  // closed and expired ids remembered a lane, for NOT_FOUND's text

// Access control. Tenants label series; tokens of a tenant are several while they are rotated.
inline constexpr size_t kTenantsMax = 256;
inline constexpr size_t kTenantNameBytesMax = 64;
inline constexpr size_t kTenantTokensMax = 64;
inline constexpr size_t kTenantCertificatesMax = 64;
inline constexpr size_t kTokenBytesMax = 512;
inline constexpr size_t kAccessFileBytesMax = size_t{1} << 20;
inline constexpr uint32_t kCallsPerSecondMax = 1000000;

// The key mean is taken over this many tokens after the sinks; until a layer holds sinks + this many, keys stay raw.
inline constexpr uint32_t kMeanTokens = 512;
// Logits of the first pass are made so much flatter, by its number of planes, before they are ranked: the noise of a
// one-plane estimate passes through exp() and lets the noisiest head of a group crowd out the others. Ten replayed
// traces, one plane, needle share of the worst: 0.957 as they are, 0.972 at 0.3; two planes: 1.000 either way.
inline constexpr float kScanFlatness[2] = {0.3f, 1.0f};
// Policies. Bounds of K: the load's are the article's; scaling by length goes lower, as it takes from short sessions.
inline constexpr uint32_t kLoadAdaptiveTokensMin = 256;
inline constexpr uint32_t kLoadAdaptiveTokensMax = 2048;
inline constexpr uint32_t kLengthScaledTokensMin = 64;
inline constexpr uint32_t kLengthScaledTokensMax = 2048;
// Least SimHash similarity that makes a candidate redundant: half is what two keys at random have.
inline constexpr float kDedupSimilarityMin = 0.5f;
// Factors by which position or tag may change a share before it is ranked.
inline constexpr float kRecencyWeightMin = 0.01f;
inline constexpr float kRecencyWeightMax = 100;
inline constexpr float kTagWeightBoostMax = 100;
inline constexpr float kTokenWeightMax = 1e6f;
inline constexpr uint32_t kClassQuotasMax = 16;
// What a call may wait in its lane's queue before K shrinks: 32 layers wait 64 ms a token then.
inline constexpr std::chrono::nanoseconds kLoadTargetWait = std::chrono::milliseconds(2);

// Tokens at which Selection.open_share is the share that it says; it falls with the square root of the length. The
// default's needle share and bytes stand in kernels/cluster_search_ops.h.
inline constexpr uint32_t kOpenShareTokens = 8192;
// Centroids one maintenance step builds lists for.
inline constexpr uint32_t kMaintenanceCentroids = 16;
// Queries one maintenance step brings to their nearest centroid, and rounds of k-means.
inline constexpr uint32_t kMaintenanceQueries = 128;
inline constexpr uint32_t kQueryClusterRounds = 3;
// Tokens the tail may grow to before maintenance takes it in (MAINTENANCE_AUTO).
inline constexpr uint32_t kTailTokens = 1000;
// The same of key clusters. Every token of the tail is scored whole and answered: at head_dim 64 a tail of 1,000 costs
// 4 of the 20 bytes a token that are read at 8,192 tokens, one of 256 costs 1. A block is built anew four times instead
// of once.
inline constexpr uint32_t kClusterTailTokens = 256;

// Tokens whose keys and values one slice of an exact repeat reads: about 0.2 ms for four query heads of 128 dimensions
// on one core, the longest that a live call waits for it.
inline constexpr uint32_t kShadowSliceTokens = 2048;
// What an exact repeat may hold on the host: 16 query heads of 1,000,000 tokens in float32.
inline constexpr size_t kShadowBytesMax = size_t{64} << 20;
// Lane time that exact repeats may save up while a lane is idle, so that they never run at length: of this much time,
// the budget's share.
inline constexpr uint32_t kShadowSavingSeconds = 1;
// A token that holds more of a query head's attention is a needle.
inline constexpr double kNeedleShare = 0.1;
// A head with fewer needles says little about itself.
inline constexpr uint64_t kWorstHeadNeedles = 20;

// Steps towards a quality target: the last one is exact.
inline constexpr uint32_t kStrengthMax = 4;
// Needles that a step needs to be sure, and after which a shortfall counts however small: 16 missed of 16 leave an
// upper bound of 0.14, and of 1,024 a share is known within 0.01.
inline constexpr uint64_t kQualityNeedlesMin = 16;
inline constexpr uint64_t kQualityNeedlesMax = 1024;
// From this length on clusters pay: at 8K they lose needles, at 32K none (a quarter of the tokens opened).
inline constexpr uint32_t kLongTokens = 32768;

}  // namespace ctkvr::limits

// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/cluster_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace ctkvr::oracle {
namespace {

template <typename T>
T ReadAt(const std::byte* bytes, size_t index) {
  T value;
  std::memcpy(&value, bytes + index * sizeof(T), sizeof(T));
  return value;
}

double ReadScale(const std::byte* scales, size_t cluster) {
  const uint32_t bits = uint32_t{ReadAt<uint16_t>(scales, cluster)} << 16;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return scale;
}

Row ReadMean(const std::byte* levels, const std::byte* scales, size_t cluster, size_t dim) {
  Row mean(dim);
  for (size_t i = 0; i < dim; ++i) {
    mean[i] = ReadScale(scales, cluster) * ReadAt<int8_t>(levels, cluster * dim + i);
  }
  return mean;
}

// Zeros stay zeros.
Row Direction(const Row& a) {
  const double norm = std::sqrt(Dot(a, a));
  Row row(a);
  for (double& element : row) element = norm > 0 ? element / norm : 0;
  return row;
}

Matrix Directions(const Matrix& keys, const std::vector<uint32_t>& cluster_of, const Matrix& before) {
  Matrix sums(before.size(), Row(keys[0].size()));
  for (size_t t = 0; t < keys.size(); ++t) {
    const Row direction = Direction(keys[t]);
    for (size_t i = 0; i < direction.size(); ++i) sums[cluster_of[t]][i] += direction[i];
  }
  for (size_t c = 0; c < sums.size(); ++c) sums[c] = Dot(sums[c], sums[c]) > 0 ? Direction(sums[c]) : before[c];
  return sums;
}

// A value stands for `counts` tokens of logits [R][values].
Attention AttendWeighted(const Matrix& logits, const Matrix& values, const Row& counts) {
  Attention attention;
  for (const Row& row : logits) {
    double largest = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t t = 0; t < row.size(); ++t) {
      if (counts[t] > 0) largest = std::max(largest, row[t]);
    }
    Row& output = attention.output.emplace_back(values[0].size());
    for (size_t t = 0; t < row.size(); ++t) {
      const double weight = counts[t] * std::exp(row[t] - largest);
      if (!(weight > 0)) continue;
      sum += weight;
      for (size_t i = 0; i < output.size(); ++i) output[i] += weight * values[t][i];
    }
    for (double& element : output) element = sum > 0 ? element / sum : 0;
    attention.log_sum_exp.push_back(sum > 0 ? largest + std::log(sum) : largest);
  }
  return attention;
}

}  // namespace

Clusters DecodeClusters(const ClusterLayout& layout, std::span<const std::byte* const> blocks, uint32_t begin,
                        uint32_t end, const Codec& codec) {
  Clusters clusters;
  uint32_t position = begin;
  for (const std::byte* block : blocks) {
    const size_t first = clusters.counts.size();
    uint32_t slot = position % 1024;
    for (size_t c = 0; c < layout.clusters; ++c) {
      const uint32_t cluster_end = ReadAt<uint16_t>(block + layout.ends_offset, c);
      clusters.counts.push_back(cluster_end - slot);
      slot = cluster_end;
      clusters.keys.emplace_back(layout.head_dim);
      clusters.values.emplace_back(layout.value_dim);
      clusters.spreads.push_back(0);
      if (clusters.counts.back() == 0) continue;
      Row key = ReadMean(block + layout.key_means_offset, block + layout.key_scales_offset, c, layout.head_dim);
      if (layout.coded) key = Unrotated(key, codec.signs);
      for (size_t i = 0; i < key.size(); ++i) {
        key[i] += layout.coded ? codec.mean[i] : double{ReadAt<float>(block + layout.centre_offset, i)};
      }
      clusters.keys.back() = key;
      clusters.spreads.back() = FromF16(ReadAt<uint16_t>(block + layout.spreads_offset, c));
      clusters.values.back() =
          ReadMean(block + layout.value_means_offset, block + layout.value_scales_offset, c, layout.value_dim);
    }
    do {
      const uint32_t offset = position % 1024;
      const uint32_t packed = ReadAt<uint16_t>(block + layout.places_offset, offset) / 1024;
      const bool apart = layout.members_offset != 0;
      const uint32_t member = apart ? ReadAt<uint8_t>(block + layout.members_offset, offset) : packed;
      clusters.cluster_of.push_back(static_cast<uint32_t>(first + member));
    } while (++position % 1024 != 0 && position < end);
  }
  return clusters;
}

std::vector<uint32_t> ClusterKeys(const Matrix& keys, uint32_t clusters) {
  Matrix units, directions;
  for (const Row& key : keys) units.push_back(Direction(key));
  Row nearest(keys.size(), -2);
  for (size_t seed = 0; directions.size() < clusters;) {
    directions.push_back(units[seed]);
    for (size_t t = 0; t < keys.size(); ++t) nearest[t] = std::max(nearest[t], Dot(units[t], units[seed]));
    seed = static_cast<size_t>(std::min_element(nearest.begin(), nearest.end()) - nearest.begin());
  }
  std::vector<uint32_t> cluster_of(keys.size());
  for (uint32_t round = 0; round <= kClusterRounds; ++round) {
    if (round > 0) directions = Directions(keys, cluster_of, directions);
    for (size_t t = 0; t < keys.size(); ++t) {
      Row cosines;
      for (const Row& direction : directions) cosines.push_back(Dot(keys[t], direction));
      cluster_of[t] = static_cast<uint32_t>(std::max_element(cosines.begin(), cosines.end()) - cosines.begin());
    }
  }
  return cluster_of;
}

double SumOfCosines(const Matrix& keys, const std::vector<uint32_t>& cluster_of) {
  const uint32_t clusters = *std::max_element(cluster_of.begin(), cluster_of.end()) + 1;
  const Matrix directions = Directions(keys, cluster_of, Matrix(clusters, Row(keys[0].size())));
  double sum = 0;
  for (size_t t = 0; t < keys.size(); ++t) sum += Dot(Direction(keys[t]), directions[cluster_of[t]]);
  return sum;
}

Attention Remainder(const Clusters& clusters, const std::vector<uint32_t>& left_out, uint32_t begin,
                    const Matrix& queries, const Softmax& softmax) {
  Row left(clusters.counts.begin(), clusters.counts.end());
  for (const uint32_t token : left_out) {
    if (token >= begin && token - begin < clusters.cluster_of.size()) left[clusters.cluster_of[token - begin]] -= 1;
  }
  return AttendWeighted(Logits(Scores(queries, clusters.keys), softmax), clusters.values, left);
}

Row ClusterRanks(const Clusters& clusters, const Matrix& queries, const Matrix& forced_scores,
                 const ClusterRanking& ranking) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double end = std::sqrt(2 * std::log(ranking.tokens_per_cluster));
  Matrix expected = Logits(Scores(queries, clusters.keys), ranking.softmax);
  const Matrix forced = Logits(forced_scores, ranking.softmax);
  Matrix log_shares;
  for (size_t r = 0; r < queries.size(); ++r) {
    double largest = -infinity;
    for (size_t c = 0; c < clusters.counts.size(); ++c) {
      double& logit = expected[r][c];
      double deviation = ranking.softmax.scale * std::sqrt(Dot(queries[r], queries[r])) * clusters.spreads[c];
      if (ranking.softmax.softcap > 0) deviation *= 1 - std::pow(logit / ranking.softmax.softcap, 2);
      logit += deviation < end ? deviation * deviation / 2 : end * deviation - end * end / 2;
      if (clusters.counts[c] == 0) logit = -infinity;
      largest = std::max(largest, logit);
    }
    for (const double logit : forced[r]) largest = std::max(largest, logit);
    double sum = 0;
    for (size_t c = 0; c < clusters.counts.size(); ++c) sum += clusters.counts[c] * std::exp(expected[r][c] - largest);
    for (const double logit : forced[r]) sum += std::exp(logit - largest);
    Row& row = log_shares.emplace_back(expected[r]);
    for (double& logit : row) logit -= largest + std::log(sum);
  }
  Row ranks = GroupRanks(log_shares, ranking.reduction);
  for (size_t c = 0; c < ranks.size(); ++c) {
    if (clusters.counts[c] == 0) ranks[c] = -infinity;
  }
  return ranks;
}

}  // namespace ctkvr::oracle

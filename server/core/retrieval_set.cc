// SPDX-License-Identifier: Apache-2.0

#include "server/core/retrieval_set.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>

#include "server/core/limits.h"

namespace ctkvr {
namespace {

// Lays out a set's arrays and fills in its operations.
class SetBuilder {
 public:
  SetBuilder(BatchMemory& memory, RetrievalSet& set)
      : memory_(memory), set_(set), item_(*set.item), layer_(*set.item->layer) {}

  void Build() {
    const LayerConfig& config = layer_.config();
    heads_ = item_.plan.set_heads;
    set_.kv_head = heads_ == config.group_heads() ? set_.set : set_.set / config.group_heads();
    set_.first_q_head = set_.set * heads_;
    set_.visible = set_.plan->visible();
    view_ = memory_.Stage(layer_.View(set_.kv_head), Layer::page_count(layer_.length()));
    visible_ = memory_.In(&set_.visible, 1);
    if (set_.scores()) {
      query_ = Prepare(set_.first_q_head, heads_);
      const uint32_t scanned = set_.is(Path::kSketch) ? set_.plan->visible() : set_.plan->scanned_max;
      const uint32_t widest = std::max(scanned, set_.plan->scored_max);
      if (set_.selects()) policy_ = MakePolicy();
      if (set_.selects()) workspace_ = memory_.Take<std::byte>(SelectTokensWorkspaceBytes(widest));
      if (set_.is(Path::kSketch)) BuildSketch();
      if (set_.opens_clusters()) BuildClusters();
      if (set_.is(Path::kCentroids)) BuildCentroids();
      BuildScore();
    }
    if (set_.selects()) BuildSelect();
    if (item_.wants_rows()) BuildGather();
    if (item_.wants_attention()) BuildAttend();
    if (set_.estimates()) BuildRest();
  }

 private:
  // The tokens an operation works on: a list, or all that are visible.
  struct Tokens {
    const uint32_t* tokens = nullptr;
    const uint32_t* count = nullptr;
    uint32_t count_max = 0;
  };

  PreparedQuery Prepare(uint32_t first_q_head, uint32_t heads) {
    const LayerConfig& config = layer_.config();
    const size_t head_bytes = config.head_dim * DTypeBytes(item_.query->dtype);
    const size_t first = size_t{set_.position} * config.q_heads + first_q_head;
    set_.prepare.push_back(
        MakePrepare(memory_, layer_, view_, item_.query->queries.subspan(first * head_bytes, heads * head_bytes)));
    return set_.prepare.back().out;
  }

  // What moves every ranking of the set.
  RankPolicy MakePolicy() {
    const PolicyConfig& policies = *item_.policies;
    const uint32_t end = set_.plan->end;
    RankPolicy policy;
    if (end > 1) {
      policy.recency_min = policies.recency_weight_min;
      policy.recency_max = policies.recency_weight_max;
      policy.length = end;
    }
    const TokenTags* tags = layer_.tags();
    if (policies.tag_weight_boost > 0) {
      policy.weights = memory_.In(tags->weights().data(), end);
      policy.weight_boost = policies.tag_weight_boost;
    }
    if (!policies.class_quotas.empty()) {
      policy.classes = memory_.In(tags->classes().data(), end);
      policy.class_quotas = memory_.In(tags->class_quotas().data(), kTokenClasses);
    }
    return policy;
  }

  GroupReduction Reduced() const {
    const bool max = item_.plan.used.reduction == Reduction::kMaxSoftmax;
    return max ? GroupReduction::kMaxSoftmax : GroupReduction::kSumSoftmax;
  }

  // Keeps the best k beside the always-included tokens, without the filters of the last selection.
  SelectTokensItem MakeSelect(const Tokens& tokens, const float* scores, uint32_t k) {
    const LayerConfig& config = layer_.config();
    const uint32_t chosen_max =
        static_cast<uint32_t>(std::min<uint64_t>(tokens.count_max, uint64_t{k} + set_.plan->always));
    SelectTokensItem item{.heads = heads_,
                          .scores = scores,
                          .stride = tokens.count_max,
                          .tokens = tokens.tokens,
                          .begin = set_.plan->begin,
                          .count = tokens.count,
                          .count_max = tokens.count_max,
                          .k = k,
                          .force_below = set_.plan->force_below,
                          .force_from = set_.plan->force_from,
                          .softmax = {.scale = config.softmax.scale, .softcap = config.softmax.softcap},
                          .reduction = Reduced(),
                          .min_score = -std::numeric_limits<float>::infinity(),
                          .policy = policy_,
                          .chosen_stride = chosen_max,
                          .workspace = workspace_};
    if (!config.softmax.sink_logits.empty()) {
      item.softmax.sink_logits = memory_.In(config.softmax.sink_logits.data() + set_.first_q_head, heads_);
    }
    return item;
  }
  // The same, and the host sees what is kept.
  SelectTokensItem MakeSelect(const Tokens& tokens, const float* scores, uint32_t k, TokenList& kept) {
    SelectTokensItem item = MakeSelect(tokens, scores, k);
    item.chosen = TakeList(item.chosen_stride, kept);
    item.chosen_count = memory_.Out(&kept.count, 1);
    return item;
  }
  uint32_t* TakeList(size_t count, TokenList& list) {
    uint32_t* tokens = nullptr;
    if (memory_.shares_host_memory()) {
      list.data = tokens = memory_.Take<uint32_t>(count);
    } else {
      list.copy.resize(count);
      list.data = list.copy.data();
      tokens = memory_.Out(list.copy.data(), count);
    }
    return tokens;
  }
  static Tokens ChosenOf(const SelectTokensItem& select) {
    return {.tokens = select.chosen,
            .count = select.chosen_count,
            .count_max = static_cast<uint32_t>(select.chosen_stride)};
  }

  void BuildSketch() {
    const PositionPlan& plan = *set_.plan;
    const Tokens all{.tokens = nullptr, .count = visible_, .count_max = plan.visible()};
    float* estimates = memory_.Take<float>(size_t{heads_} * plan.visible());
    set_.scan = {.view = view_,
                 .query = query_,
                 .begin = plan.begin,
                 .end = plan.end,
                 .estimates = estimates,
                 .stride = plan.visible()};
    const bool once = plan.survivors == 0;
    SelectTokensItem& first = once ? set_.select_candidates : set_.select_survivors;
    first =
        MakeSelect(all, estimates, once ? plan.candidates : plan.survivors, once ? set_.candidates : set_.survivors);
    Flatten(first);
    if (plan.survivors > 0) {
      const Tokens survivors = ChosenOf(set_.select_survivors);
      float* refined = memory_.Take<float>(size_t{heads_} * survivors.count_max);
      set_.refine = {.view = view_,
                     .query = query_,
                     .planes = item_.plan.used.refine_planes,
                     .tokens = survivors.tokens,
                     .count = survivors.count,
                     .count_max = survivors.count_max,
                     .estimates = refined,
                     .stride = survivors.count_max};
      set_.select_candidates = MakeSelect(survivors, refined, plan.candidates, set_.candidates);
    }
    if (item_.policies->dedup_similarity.has_value()) {
      set_.select_candidates.policy.redundant_view = &set_.scan.view;
      set_.select_candidates.policy.redundant_bits =
          RedundantBits(*item_.policies->dedup_similarity, layer_.config().head_dim);
    }
    scored_ = ChosenOf(set_.select_candidates);
  }

  // See limits.h.
  void Flatten(SelectTokensItem& select) const {
    select.softmax.scale *= limits::kScanFlatness[view_.layout.first_planes - 1];
  }

  const std::byte* const* ClusterBlocksIn() {
    const std::span<std::byte* const> blocks = layer_.clusters()->blocks(set_.kv_head);
    return memory_.In(blocks.data(), blocks.size());
  }

  // The tokens that are always included, and their scores: the clusters share the softmax with them.
  void BuildForced() {
    const PositionPlan& plan = *set_.plan;
    set_.list_forced = {.begin = plan.begin,
                        .end = plan.end,
                        .force_below = plan.force_below,
                        .force_from = plan.force_from,
                        .tokens = memory_.Take<uint32_t>(plan.always),
                        .count = memory_.Take<uint32_t>(1),
                        .workspace = memory_.Take<std::byte>(MergeCandidatesWorkspaceBytes(plan.begin, plan.end))};
    set_.score_forced = {.view = view_,
                         .query = query_,
                         .tokens = set_.list_forced.tokens,
                         .count = set_.list_forced.count,
                         .count_max = plan.always,
                         .scores = memory_.Take<float>(size_t{heads_} * plan.always),
                         .stride = plan.always};
  }

  void BuildOpen() {
    const LayerConfig& config = layer_.config();
    const KeyClusters& clusters = *layer_.clusters();
    const uint32_t begin = clusters.begin(), end = clusters.clustered_length();
    const uint32_t all = clusters.layout().clusters * ClusterBlocks(begin, end);
    set_.select_clusters = {
        .query = query_,
        .layout = clusters.layout(),
        .blocks = ClusterBlocksIn(),
        .begin = begin,
        .end = end,
        .open_tokens = set_.plan->open_tokens,
        .forced_scores = set_.score_forced.scores,
        .forced_stride = set_.score_forced.stride,
        .forced_count = set_.score_forced.count,
        .softmax = {.scale = config.softmax.scale, .softcap = config.softmax.softcap},
        .reduction = Reduced(),
        .scores = memory_.Take<float>(size_t{heads_} * all),
        .opened = TakeList(all, set_.opened),
        .opened_count = memory_.Out(&set_.opened.count, 1),
        .workspace = memory_.Take<std::byte>(SelectClustersWorkspaceBytes(clusters.layout(), heads_, begin, end))};
  }

  void BuildClusters() {
    BuildForced();
    BuildOpen();
    const PositionPlan& plan = *set_.plan;
    const SelectClustersItem& open = set_.select_clusters;
    const bool by_planes = set_.is(Path::kClusterSketch);
    set_.scan_clusters = {
        .view = view_,
        .query = query_,
        .layout = open.layout,
        .blocks = open.blocks,
        .begin = open.begin,
        .end = open.end,
        .opened = open.opened,
        .opened_count = open.opened_count,
        .mean_scores = open.scores,
        .visible_begin = plan.begin,
        .visible_end = plan.end,
        .force_below = plan.force_below,
        .force_from = plan.force_from,
        .tokens = by_planes ? memory_.Take<uint32_t>(plan.scanned_max) : TakeList(plan.scanned_max, set_.candidates),
        .count = by_planes ? memory_.Take<uint32_t>(1) : memory_.Out(&set_.candidates.count, 1),
        .estimates = by_planes ? memory_.Take<float>(size_t{heads_} * plan.scanned_max) : nullptr,
        .stride = plan.scanned_max};
    scored_ = {.tokens = set_.scan_clusters.tokens, .count = set_.scan_clusters.count, .count_max = plan.scanned_max};
    if (!by_planes) return;
    set_.select_candidates = MakeSelect(scored_, set_.scan_clusters.estimates, plan.candidates, set_.candidates);
    Flatten(set_.select_candidates);
    scored_ = ChosenOf(set_.select_candidates);
  }

  void BuildCentroids() {
    const PositionPlan& plan = *set_.plan;
    const LayerConfig& config = layer_.config();
    const IndexSet::Head& head = layer_.index()->live()->heads[set_.kv_head];
    const auto centroid_count = static_cast<uint32_t>(head.centroids.size());
    const uint32_t probes = item_.plan.used.probes;
    // Centroids are of the whole group, whatever the set is.
    const bool whole_group = heads_ == config.group_heads();
    set_.selected_lists.resize(probes);
    set_.select_lists = {
        .query = whole_group ? query_ : Prepare(set_.kv_head * config.group_heads(), config.group_heads()),
        .head_dim = config.head_dim,
        .centroids = memory_.In(head.centroids.data(), centroid_count),
        .centroid_count = centroid_count,
        .probes = probes,
        .selected = memory_.Out(set_.selected_lists.data(), probes)};
    set_.merge = {.packing = layer_.index()->packing(),
                  .lists = memory_.In(head.lists.data(), centroid_count),
                  .list_counts = memory_.In(head.list_counts.data(), centroid_count),
                  .selected = set_.select_lists.selected,
                  .probes = probes,
                  .begin = plan.begin,
                  .end = plan.end,
                  .force_below = plan.force_below,
                  .force_from = plan.force_from,
                  .tokens = TakeList(plan.scored_max, set_.candidates),
                  .count = memory_.Out(&set_.candidates.count, 1),
                  .workspace = memory_.Take<std::byte>(MergeCandidatesWorkspaceBytes(plan.begin, plan.end))};
    scored_ = {.tokens = set_.merge.tokens, .count = set_.merge.count, .count_max = plan.scored_max};
  }

  void BuildScore() {
    if (scored_.count == nullptr) scored_ = {.tokens = nullptr, .count = visible_, .count_max = set_.plan->visible()};
    set_.score = {.view = view_,
                  .query = query_,
                  .tokens = scored_.tokens,
                  .begin = set_.plan->begin,
                  .count = scored_.count,
                  .count_max = scored_.count_max,
                  .scores = memory_.Take<float>(size_t{heads_} * scored_.count_max),
                  .stride = scored_.count_max};
  }

  void BuildSelect() {
    const Selection& used = item_.plan.used;
    set_.select = MakeSelect(scored_, set_.score.scores, set_.plan->k_tokens);
    set_.select.chosen = memory_.Take<uint32_t>(set_.select.chosen_stride);
    set_.select.chosen_count = memory_.Out(&set_.chosen, 1);
    if (used.min_score.has_value()) set_.select.min_score = *used.min_score;
    set_.select.min_share = used.min_share;
    set_.select.top_p = used.top_p;
    if (!set_.keeps_scores()) return;
    set_.select.chosen_scores = memory_.Take<float>(heads_ * set_.select.chosen_stride);
  }

  void BuildGather() {
    const uint32_t chosen_max = set_.plan->chosen_max;
    set_.gather = {.view = view_,
                   .tokens = set_.select.chosen,
                   .count = set_.select.chosen_count,
                   .count_max = chosen_max,
                   .row_format = item_.options().row_format};
    if (!set_.selects()) {
      set_.all_tokens.resize(chosen_max);
      std::iota(set_.all_tokens.begin(), set_.all_tokens.end(), set_.plan->begin);
      set_.gather.tokens = memory_.In(set_.all_tokens.data(), chosen_max);
      set_.gather.count = visible_;
    }
    set_.gather.overflow = &set_.overflow;
    if (memory_.shares_host_memory()) return;  // rows go straight into the answer, whose place is not known yet
    const RowBytes row = AnswerRowBytes(layer_, item_.options());
    set_.gather.keys = memory_.Take<std::byte>(size_t{row.key} * chosen_max);
    set_.gather.values = memory_.Take<std::byte>(size_t{row.value} * chosen_max);
    set_.gather.overflow = memory_.Take<uint64_t>(1);
  }

  void BuildAttend() {
    const LayerConfig& config = layer_.config();
    const bool selects = set_.selects();
    set_.attend = {.view = view_,
                   .heads = heads_,
                   .tokens = selects ? set_.select.chosen : nullptr,
                   .begin = set_.plan->begin,
                   .count = selects ? set_.select.chosen_count : visible_,
                   .count_max = selects ? static_cast<uint32_t>(set_.select.chosen_stride) : set_.visible,
                   .scores = selects ? set_.select.chosen_scores : set_.score.scores,
                   .stride = selects ? set_.select.chosen_stride : set_.score.stride,
                   .softmax = {.scale = config.softmax.scale, .softcap = config.softmax.softcap}};
    const size_t elements = size_t{heads_} * config.value_dim;
    const bool in_place = memory_.shares_host_memory();
    set_.attend.output = in_place ? OutputPlace(*item_.answer.attention, set_) : memory_.Take<float>(elements);
    set_.attend.log_sum_exp = in_place ? LogSumExpPlace(*item_.answer.attention, set_) : memory_.Take<float>(heads_);
  }

  void BuildRest() {
    const LayerConfig& config = layer_.config();
    const KeyClusters& clusters = *layer_.clusters();
    const uint32_t begin = clusters.begin(), end = clusters.clustered_length();
    PartialAttention& remainder = *item_.answer.remainder;
    set_.rest = {
        .query = query_,
        .layout = clusters.layout(),
        .blocks = set_.opens_clusters() ? set_.select_clusters.blocks : ClusterBlocksIn(),
        .begin = begin,
        .end = end,
        .visible_begin = set_.plan->begin,
        .visible_end = set_.plan->end,
        .tokens = set_.select.chosen,
        .count = set_.select.chosen_count,
        .count_max = static_cast<uint32_t>(set_.select.chosen_stride),
        .softmax = {.scale = config.softmax.scale, .softcap = config.softmax.softcap},
        .mean_scores = set_.opens_clusters() ? set_.select_clusters.scores : nullptr,
        .output = memory_.Out(OutputPlace(remainder, set_), size_t{heads_} * config.value_dim),
        .log_sum_exp = memory_.Out(LogSumExpPlace(remainder, set_), heads_),
        .lines_read = memory_.Out(&set_.rest_lines, 1),
        .workspace = memory_.Take<std::byte>(EstimateRestWorkspaceBytes(clusters.layout(), heads_, begin, end))};
  }

  BatchMemory& memory_;
  RetrievalSet& set_;
  RetrievalItem& item_;
  Layer& layer_;
  uint32_t heads_ = 0;
  HeadView view_;
  const uint32_t* visible_ = nullptr;
  PreparedQuery query_;
  std::byte* workspace_ = nullptr;
  RankPolicy policy_;
  Tokens scored_;
};

}  // namespace

float* OutputPlace(PartialAttention& attention, const RetrievalSet& set) {
  const size_t row = size_t{set.position} * attention.q_heads + set.first_q_head;
  return reinterpret_cast<float*>(attention.output.data()) + row * attention.value_dim;
}

float* LogSumExpPlace(PartialAttention& attention, const RetrievalSet& set) {
  const size_t row = size_t{set.position} * attention.q_heads + set.first_q_head;
  return reinterpret_cast<float*>(attention.log_sum_exp.data()) + row;
}

void BuildSet(BatchMemory& memory, RetrievalSet& set) { SetBuilder(memory, set).Build(); }

PrepareQueriesItem MakePrepare(BatchMemory& memory, const Layer& layer, const HeadView& view,
                               std::span<const std::byte> query) {
  const uint32_t head_dim = layer.config().head_dim;
  const size_t elements = query.size() / DTypeBytes(layer.dtype());
  const auto heads = static_cast<uint32_t>(elements / head_dim);
  PrepareQueriesItem item{.query = memory.In(query.data(), query.size()),
                          .dtype = layer.dtype(),
                          .head_dim = head_dim,
                          .mean = nullptr,
                          .signs = nullptr,
                          .out = {}};
  item.out.heads = heads;
  item.out.plain = memory.Take<float>(elements);
  if (!layer.coded() || layer.raw()) return item;
  item.mean = view.mean;
  item.signs = view.signs;
  item.out.rotated = memory.Take<float>(elements);
  item.out.rotated_sum = memory.Take<float>(heads);
  item.out.mean_dot = memory.Take<float>(heads);
  item.out.scan = memory.Take<int8_t>(elements);
  item.out.scan_scale = memory.Take<float>(heads);
  item.out.scan_sum = memory.Take<int32_t>(heads);
  item.out.refine = memory.Take<int8_t>(elements);
  item.out.refine_scale = memory.Take<float>(heads);
  item.out.refine_sum = memory.Take<int32_t>(heads);
  return item;
}

void AddStages(const RetrievalSet& set, Explanation& explanation) {
  const PositionPlan& plan = *set.plan;
  uint64_t scanned = plan.visible(), survivors = scanned, candidates = scanned;
  if (set.is(Path::kSketch)) candidates = plan.scored_max;
  if (set.is(Path::kSketch) && plan.survivors > 0) survivors = std::min(plan.visible(), plan.survivors + plan.always);
  if (set.is(Path::kCentroids)) scanned = survivors = candidates = set.candidates.count;
  explanation.scanned += scanned;
  explanation.survivors += survivors;
  explanation.candidates += candidates;
  explanation.scored += set.scores() ? candidates : 0;
  explanation.chosen += set.chosen;
}

}  // namespace ctkvr

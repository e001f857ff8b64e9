// SPDX-License-Identifier: Apache-2.0
#include "client/cli/selection_flags.h"

#include <algorithm>
#include <cctype>
#include <set>

namespace ctkvr::cli {
namespace {

std::string Upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// The enum value of type "SOURCE_" and name "sketch".
template <typename Enum>
Enum Parse(const std::string& prefix, const std::string& name, bool (*parse)(const std::string&, Enum*)) {
  Enum value{};
  parse(prefix + Upper(name), &value);
  return value;
}

}  // namespace

void AddSelectionFlags(CLI::App* command, SelectionFlags* flags) {
  const auto one_of = [](std::set<std::string> names) { return CLI::IsMember(std::move(names)); };
  command->add_option("--format", flags->format, "How keys and values are stored")
      ->check(one_of({"f32", "f16", "bf16", "k8v8", "k8v4", "k6v4"}))
      ->capture_default_str();
  command->add_option("--source", flags->source, "Where candidates come from")
      ->check(one_of({"auto", "dense", "exact", "sketch", "query_centroids", "key_centroids", "key_centroids_sketch"}))
      ->capture_default_str();
  command->add_option("--reduction", flags->reduction, "How the heads of a group become one ranking")
      ->check(one_of({"sum_softmax", "max_softmax", "per_head"}))
      ->capture_default_str();
  command->add_option("--k", flags->k_tokens, "Tokens chosen a KV head beside the always-included ones")
      ->capture_default_str();
  command->add_option("--first-planes", flags->first_planes, "sketch: bit planes of the first pass, 1 or 2")
      ->capture_default_str();
  command->add_option("--keep-share", flags->keep_share, "sketch: share of the tokens that survives the first pass")
      ->capture_default_str();
  command->add_option("--refine-planes", flags->refine_planes, "sketch: planes of the second pass; 0 skips it")
      ->capture_default_str();
  command->add_option("--candidates", flags->candidate_tokens, "sketch: tokens scored with all planes")
      ->capture_default_str();
  command->add_option("--centroids", flags->centroids, "query_centroids: centroids a KV head")->capture_default_str();
  command->add_option("--list-tokens", flags->list_tokens, "query_centroids: tokens a list")->capture_default_str();
  command->add_option("--placement", flags->placement, "query_centroids: which queries become centroids")
      ->check(one_of({"last", "strided", "clustered"}))
      ->capture_default_str();
  command->add_option("--probes", flags->probes, "query_centroids: lists read a query")->capture_default_str();
  command->add_option("--sinks", flags->sink_tokens, "First tokens, always included")->capture_default_str();
  command->add_option("--window", flags->window_tokens, "Last tokens, always included")->capture_default_str();
  command->add_option("--dense-below", flags->dense_below_tokens, "Layers of at most so many tokens answer with all")
      ->capture_default_str();
  command->add_flag("--load-adaptive-k", flags->load_adaptive_k, "Policy: K follows the time that calls wait");
  command->add_flag("--length-scaled-k", flags->length_scaled_k, "Policy: K follows the root of the length");
  command->add_option("--ramp", flags->ramp_tokens, "Policy: tokens from answering with all to answering with K")
      ->capture_default_str();
  command
      ->add_option("--dedup", flags->dedup_similarity,
                   "Policy: candidates as like to a better one are not scored; 0: all")
      ->capture_default_str();
  command->add_option("--recency-min", flags->recency_weight_min, "Policy: ranking weight of the oldest token")
      ->capture_default_str();
  command->add_option("--recency-max", flags->recency_weight_max, "Policy: ranking weight of the newest token")
      ->capture_default_str();
  command->add_option("--answer", flags->answer, "What a reply carries")
      ->check(one_of({"ids", "scores", "rows", "new_rows", "attention"}))
      ->capture_default_str();
  command->add_option("--cache-slots", flags->cache_slots, "new_rows: slots of the row cache, a KV head")
      ->capture_default_str();
  command->add_option("--row-format", flags->row_format, "Form of the rows, or the attention, of a reply")
      ->check(one_of({"f32", "f16", "bf16", "storage"}))
      ->capture_default_str();
  command
      ->add_option("--needle-share-target", flags->needle_share_target,
                   "Needle share below which the server moves to stronger settings; 0: none")
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "Seed of the rotation of coded keys; 0: the server draws one")
      ->capture_default_str();
  command->add_option("--open-share", flags->open_share, "key_centroids_sketch: share of the tokens opened, at 8,192")
      ->capture_default_str();
  command->add_option("--tokens-per-cluster", flags->tokens_per_cluster, "Tokens a key cluster; 0 keeps none")
      ->capture_default_str();
  command->add_flag("--remainder,!--no-remainder", flags->remainder,
                    "Ask for the attention over what was not chosen, where answers carry values");
  command->add_flag("--maintain", flags->maintain,
                    "Let the server take the tail into index and clusters between calls");
}

namespace {

bool KeepsClusters(const SelectionFlags& flags) {
  return flags.format.starts_with('k') && flags.tokens_per_cluster > 0;
}

bool CarriesValues(v1::AnswerMode mode) {
  return mode == v1::ANSWER_MODE_ROWS || mode == v1::ANSWER_MODE_NEW_ROWS || mode == v1::ANSWER_MODE_ATTENTION;
}

}  // namespace

v1::SessionOptions MakeSessionOptions(const SelectionFlags& flags) {
  v1::SessionOptions options;
  options.set_format(Parse<v1::Format>("FORMAT_", flags.format, &v1::Format_Parse));
  options.set_first_planes(flags.first_planes);
  options.set_rotation_seed(flags.seed);
  options.set_maintenance(flags.maintain ? v1::MAINTENANCE_AUTO : v1::MAINTENANCE_MANUAL);
  options.mutable_key_clusters()->set_tokens_per_cluster(KeepsClusters(flags) ? flags.tokens_per_cluster : 0);
  if (flags.needle_share_target > 0) {
    options.mutable_policies()->set_needle_share_target(flags.needle_share_target);
  }
  if (flags.answer == "new_rows") options.set_cache_slots(flags.cache_slots);
  v1::Policies* policies = options.mutable_policies();
  policies->set_load_adaptive_k(flags.load_adaptive_k);
  policies->set_length_scaled_k(flags.length_scaled_k);
  policies->set_ramp_tokens(flags.ramp_tokens);
  if (flags.dedup_similarity != 0) policies->set_dedup_similarity(flags.dedup_similarity);
  if (flags.recency_weight_min != 1) policies->set_recency_weight_min(flags.recency_weight_min);
  if (flags.recency_weight_max != 1) policies->set_recency_weight_max(flags.recency_weight_max);
  v1::Selection* selection = options.mutable_selection();
  selection->set_source(Parse<v1::Source>("SOURCE_", flags.source, &v1::Source_Parse));
  selection->set_reduction(Parse<v1::GroupReduction>("GROUP_REDUCTION_", flags.reduction, &v1::GroupReduction_Parse));
  selection->set_k_tokens(flags.k_tokens);
  selection->set_sink_tokens(flags.sink_tokens);
  selection->set_window_tokens(flags.window_tokens);
  selection->set_dense_below_tokens(flags.dense_below_tokens);
  if (selection->source() == v1::SOURCE_SKETCH) {
    selection->set_keep_share(flags.keep_share);
    selection->set_refine_planes(flags.refine_planes);
    selection->set_candidate_tokens(flags.candidate_tokens);
  }
  if (selection->source() == v1::SOURCE_QUERY_CENTROIDS) {
    selection->set_probes(flags.probes);
    v1::QueryCentroidOptions* set = options.add_query_centroids();
    set->set_centroids(flags.centroids);
    set->set_list_tokens(flags.list_tokens);
    set->set_placement(Parse<v1::QueryCentroidOptions::Placement>("PLACEMENT_", flags.placement,
                                                                  &v1::QueryCentroidOptions::Placement_Parse));
  }
  const bool by_planes = selection->source() == v1::SOURCE_KEY_CENTROIDS_SKETCH;
  if (by_planes) selection->set_open_share(flags.open_share);
  if (by_planes || selection->source() == v1::SOURCE_KEY_CENTROIDS) {
    selection->set_candidate_tokens(flags.candidate_tokens);
    options.mutable_key_clusters()->set_tokens_per_cluster(flags.tokens_per_cluster);
  }
  return options;
}

v1::AnswerOptions MakeAnswerOptions(const SelectionFlags& flags) {
  v1::AnswerOptions options;
  options.set_mode(Parse<v1::AnswerMode>("ANSWER_MODE_", flags.answer, &v1::AnswerMode_Parse));
  options.set_row_format(Parse<v1::RowFormat>("ROW_FORMAT_", flags.row_format, &v1::RowFormat_Parse));
  options.set_remainder(flags.remainder && KeepsClusters(flags) && CarriesValues(options.mode()));
  return options;
}

std::string ShortName(v1::Source source) { return Lower(v1::Source_Name(source).substr(sizeof("SOURCE_") - 1)); }
std::string ShortName(v1::Format format) { return Lower(v1::Format_Name(format).substr(sizeof("FORMAT_") - 1)); }

}  // namespace ctkvr::cli

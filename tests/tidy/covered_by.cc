// SPDX-License-Identifier: Apache-2.0
//
// Sources without a mirror test of their own, and the test that covers them instead.

#include "tests/tidy/tree_rules.h"

namespace ctkvr::tidy {

const std::map<std::string, std::string>& CoveredBy() {
  static const auto* const table = new std::map<std::string, std::string>{
      // Operations: conformance cases hold every instruction set to the oracle.
      {"kernels/cpu/arrange_sketch.cc", "tests/conformance/arrange_op_test.cc"},
      {"kernels/cpu/assign_queries.cc", "tests/conformance/query_cluster_op_test.cc"},
      {"kernels/cpu/average_queries.cc", "tests/conformance/query_cluster_op_test.cc"},
      {"kernels/cpu/attend.cc", "tests/conformance/attend_op_test.cc"},
      {"kernels/cpu/build_clusters.cc", "tests/conformance/cluster_op_test.cc"},
      {"kernels/cpu/build_lists.cc", "tests/conformance/list_op_test.cc"},
      {"kernels/cpu/estimate_rest.cc", "tests/conformance/cluster_op_test.cc"},
      {"kernels/cpu/fit_mean.cc", "tests/conformance/row_op_test.cc"},
      {"kernels/cpu/gather_rows.cc", "tests/conformance/gather_op_test.cc"},
      {"kernels/cpu/mean_scores.cc", "tests/conformance/cluster_op_test.cc"},
      {"kernels/cpu/merge_candidates.cc", "tests/conformance/list_op_test.cc"},
      {"kernels/cpu/prepare_query.cc", "tests/conformance/query_op_test.cc"},
      {"kernels/cpu/refine_planes.cc", "tests/conformance/scan_op_test.cc"},
      {"kernels/cpu/scan_clusters.cc", "tests/conformance/cluster_search_op_test.cc"},
      {"kernels/cpu/scan_planes.cc", "tests/conformance/scan_op_test.cc"},
      {"kernels/cpu/score_block.cc", "tests/conformance/scan_op_test.cc"},
      {"kernels/cpu/score_tokens.cc", "tests/conformance/scan_op_test.cc"},
      {"kernels/cpu/select_clusters.cc", "tests/conformance/cluster_search_op_test.cc"},
      {"kernels/cpu/select_lists.cc", "tests/conformance/list_op_test.cc"},
      {"kernels/cpu/select_tokens.cc", "tests/conformance/select_op_test.cc"},
      {"kernels/cpu/sketch_scan.cc", "tests/conformance/scan_op_test.cc"},
      {"kernels/cpu/top_k.cc", "tests/conformance/select_op_test.cc"},
      {"kernels/cpu/write_centroids.cc", "tests/conformance/query_op_test.cc"},
      {"kernels/cpu/write_tokens.cc", "tests/conformance/row_op_test.cc"},
      // Loops of one instruction set: all of them against the portable ones.
      {"kernels/cpu/rows_avx2.cc", "tests/kernels/cpu/rows_test.cc"},
      {"kernels/cpu/rows_avx512.cc", "tests/kernels/cpu/rows_test.cc"},
      {"kernels/cpu/rows_portable.cc", "tests/kernels/cpu/rows_test.cc"},
      {"kernels/cpu/scan_avx2.cc", "tests/conformance/scan_kernels_test.cc"},
      {"kernels/cpu/scan_avx512.cc", "tests/conformance/scan_kernels_test.cc"},
      {"kernels/cpu/scan_portable.cc", "tests/conformance/scan_kernels_test.cc"},
      // Parts of a layer and of a retrieval: through the engine, against the oracle.
      {"server/core/index_clustering.cc", "tests/server/core/index_test.cc"},
      {"server/core/index_ring.cc", "tests/server/core/index_test.cc"},
      {"server/core/partial_attention.cc", "tests/server/core/retriever_attention_test.cc"},
      {"server/core/repeat_check.cc", "tests/server/core/appender_test.cc"},
      {"server/core/retrieval_set.cc", "tests/server/core/retriever_test.cc"},
      {"server/core/step.cc", "tests/server/core/lane_test.cc"},
      {"server/rpc/codec_encode_options.cc", "tests/server/rpc/codec_options_test.cc"},
      {"server/rpc/codec_status.cc", "tests/server/rpc/status_test.cc"},
      {"client/src/admin.cc", "tests/client/cli/admin_test.cc"},
      {"client/src/core.cc", "tests/client/src/client_test.cc"},
      {"client/python/native/module.cc", "tests/client/python/test_embedded.py"},
      // Programs: started as they are.
      {"client/examples/quickstart.cc", "tests/client/cli/main_test.cc"},
      {"server/engine_options.cc", "tests/server/config_test.cc"},
      {"server/settings_table.cc", "tests/server/settings_test.cc"},
      {"server/main.cc", "tests/e2e/ctkvrd_test.cc"},
  };
  return *table;
}

}  // namespace ctkvr::tidy

// SPDX-License-Identifier: Apache-2.0
//
// The operations of ops.h and the pages beside it on host memory, one item each, one file each. Thread-safe: they touch
// nothing but the item.

#pragma once

#include "kernels/attention_ops.h"
#include "kernels/cluster_search_ops.h"
#include "kernels/cpu/kernels.h"
#include "kernels/list_ops.h"
#include "kernels/ops.h"

namespace ctkvr::cpu {

void PrepareQuery(const CpuKernels& kernels, const PrepareQueriesItem& item);
void FitMean(const CpuKernels& kernels, const FitMeanItem& item);
void WriteTokens(const CpuKernels& kernels, const WriteTokensItem& item);
void ScanPlanes(const CpuKernels& kernels, const ScanPlanesItem& item);
void RefinePlanes(const CpuKernels& kernels, const RefinePlanesItem& item);
void ScoreTokens(const CpuKernels& kernels, const ScoreTokensItem& item);
void SelectTokens(const CpuKernels& kernels, const SelectTokensItem& item);
void WriteCentroids(const CpuKernels& kernels, const WriteCentroidsItem& item);
void AssignQueries(const CpuKernels& kernels, const AssignQueriesItem& item);
void AverageQueries(const CpuKernels& kernels, const AverageQueriesItem& item);
void BuildLists(const CpuKernels& kernels, const BuildListsItem& item);
void SelectLists(const CpuKernels& kernels, const SelectListsItem& item);
void MergeCandidates(const CpuKernels& kernels, const MergeCandidatesItem& item);
void GatherRows(const CpuKernels& kernels, const GatherRowsItem& item);
void Attend(const CpuKernels& kernels, const AttendItem& item);
void BuildClusters(const CpuKernels& kernels, const BuildClustersItem& item);
void ArrangeSketch(const CpuKernels& kernels, const ArrangeSketchItem& item);
void EstimateRest(const CpuKernels& kernels, const EstimateRestItem& item);
void SelectClusters(const CpuKernels& kernels, const SelectClustersItem& item);
void ScanClusters(const CpuKernels& kernels, const ScanClustersItem& item);

}  // namespace ctkvr::cpu

// SPDX-License-Identifier: Apache-2.0
//
// What a retrieval reads to choose and to estimate the remainder, counted in whole lines of 64 bytes, as memory is
// read: lines of planes, scales, records, keys, centroids, lists and clusters, each once a set, however many passes
// touch it. Not counted: queries, tables of pointers, counts of lists, and the rows of the answer.
// Thread-safe: pure functions.

#pragma once

#include <cstdint>

#include "server/core/retrieval_set.h"

namespace ctkvr {

// REQUIRES: counts and lists have arrived.
uint64_t BytesRead(const RetrievalSet& set);

}  // namespace ctkvr

// SPDX-License-Identifier: Apache-2.0
//
// What the benchmarks share: Google Benchmark with rounds in random order, and one table of medians with their spread
// and their ratios to a memory copy and to a plain scan measured in the same run. Not thread-safe.

#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>
#include <string>

namespace ctkvr::bench {

// From the command line, beside Google Benchmark's own flags.
struct Options {
  bool smoke = false;           // --smoke: tiny sizes, one round; shows that everything runs
  uint32_t tokens = 100000;     // --tokens=N
  std::string backend = "cpu";  // --backend=cpu:avx2, as CreateBackend takes it
};

// What one iteration works on. 0: not counted.
struct Work {
  double bytes = 0;   // read and written (copies count both)
  double tokens = 0;  // keys looked at, one KV head each
};

inline constexpr char kCopy[] = "memory copy";
inline constexpr char kPlainScan[] = "plain fp16 scan, 4 heads";

// Reads the flags that are ours and starts Google Benchmark: nine rounds of 0.2 s each in random order, unless flags
// say otherwise. Exits with 2 on a flag nobody knows.
Options Start(int argc, char** argv);

// A line of the table. `run` is one iteration; `iterations` 0 lets Google Benchmark choose.
void Add(const std::string& name, const Work& work, std::function<void()> run, int64_t iterations = 0);

// Runs all, prints machine, command and table. Returns the exit code.
int Finish();

// Reports a status that is not OK and ends the program: a benchmark of a failing operation means nothing.
void CheckOk(bool ok, const std::string& message);

}  // namespace ctkvr::bench

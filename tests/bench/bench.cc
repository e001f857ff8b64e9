// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/bench.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "tests/bench/machine.h"

namespace ctkvr::bench {
namespace {

std::string& CommandLine() {
  static auto* const command = new std::string();
  return *command;
}

// Value of sorted `rounds` below which the share p of them lies.
double Percentile(const std::vector<double>& rounds, double p) {
  const double at = p * static_cast<double>(rounds.size() - 1);
  const size_t below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, rounds.size() - 1);
  return rounds[below] + (at - static_cast<double>(below)) * (rounds[above] - rounds[below]);
}

struct Line {
  std::string name;
  Work work;
  std::vector<double> seconds;  // an iteration, one entry a round
};

// The table in the order of Add; rounds come back in random order.
std::vector<Line>& Lines() {
  static auto* const lines = new std::vector<Line>();
  return *lines;
}

Line* FindLine(std::string_view name) {
  for (Line& line : Lines()) {
    if (line.name == name) return &line;
  }
  return nullptr;
}

class TableReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      // "name/iterations:1/repeats:9/real_time" -> "name"
      const std::string name = run.benchmark_name().substr(0, run.benchmark_name().find('/'));
      FindLine(name)->seconds.push_back(run.GetAdjustedRealTime() / benchmark::GetTimeUnitMultiplier(run.time_unit));
    }
  }

  void Finalize() override {
    std::erase_if(Lines(), [](const Line& line) { return line.seconds.empty(); });  // left out by a filter
    for (Line& line : Lines()) std::sort(line.seconds.begin(), line.seconds.end());
    const double copy = Rate(kCopy, &Work::bytes);
    const double scan = Rate(kPlainScan, &Work::tokens);
    std::printf("%s\ncommand: %s\nrounds: %zu, in random order; p10 and p90 are of the rounds\n\n",
                DescribeMachine().c_str(), CommandLine().c_str(), Lines().empty() ? 0 : Lines()[0].seconds.size());
    std::printf(
        "| what | median ms | p10 | p90 | GB/s | Mtoken/s | bytes: ratio to copy | tokens: ratio to plain scan |\n");
    std::printf("|---|---|---|---|---|---|---|---|\n");
    for (const Line& line : Lines()) PrintLine(line, copy, scan);
  }

 private:
  static double Rate(std::string_view name, double Work::*work) {
    const Line* line = FindLine(name);
    return line == nullptr || line->seconds.empty() ? 0 : line->work.*work / Percentile(line->seconds, 0.5);
  }

  static void PrintLine(const Line& line, double copy, double scan) {
    const double median = Percentile(line.seconds, 0.5);
    const double bytes = line.work.bytes / median;
    const double tokens = line.work.tokens / median;
    std::printf("| %s | %.4g | %.4g | %.4g |", line.name.c_str(), 1e3 * median, 1e3 * Percentile(line.seconds, 0.1),
                1e3 * Percentile(line.seconds, 0.9));
    PrintCell(bytes > 0, "%.2f", 1e-9 * bytes);
    PrintCell(tokens > 0, "%.1f", 1e-6 * tokens);
    PrintCell(bytes > 0 && copy > 0, "%.3f", bytes / copy);
    PrintCell(tokens > 0 && scan > 0, "%.2f", tokens / scan);
    std::printf("\n");
  }

  static void PrintCell(bool known, const char* format, double value) {
    std::printf(" ");
    if (known) std::printf(format, value);  // NOLINT: the formats are the four above
    std::printf(" |");
  }
};

bool TakeFlag(std::string_view argument, std::string_view name, std::string& value) {
  if (!argument.starts_with(name)) return false;
  value = std::string(argument.substr(name.size()));
  return true;
}

}  // namespace

Options Start(int argc, char** argv) {
  Options options;
  std::vector<std::string> arguments = {argv[0], "--benchmark_repetitions=9",
                                        "--benchmark_enable_random_interleaving=true", "--benchmark_min_time=0.2"};
  for (int i = 0; i < argc; ++i) CommandLine() += (i == 0 ? "" : " ") + std::string(argv[i]);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    std::string value;
    if (argument == "--smoke") {
      options.smoke = true;
      options.tokens = 3000;
      arguments.insert(arguments.end(), {"--benchmark_repetitions=1", "--benchmark_min_time=0"});
    } else if (TakeFlag(argument, "--tokens=", value)) {
      options.tokens = static_cast<uint32_t>(std::strtoul(value.c_str(), nullptr, 10));
    } else if (TakeFlag(argument, "--backend=", value)) {
      options.backend = value;
    } else {
      arguments.emplace_back(argument);
    }
  }
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  int count = static_cast<int>(pointers.size());
  benchmark::Initialize(&count, pointers.data());
  if (benchmark::ReportUnrecognizedArguments(count, pointers.data())) std::exit(2);
  return options;
}

void Add(const std::string& name, const Work& work, std::function<void()> run, int64_t iterations) {
  auto* registered = benchmark::RegisterBenchmark(name.c_str(), [run](benchmark::State& state) {
    for (auto _ : state) run();
  });
  Lines().push_back({name, work, {}});
  registered->UseRealTime();
  if (iterations > 0) registered->Iterations(iterations);
}

int Finish() {
  TableReporter reporter;
  const size_t ran = benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmark::Shutdown();
  return ran > 0 ? 0 : 1;
}

void CheckOk(bool ok, const std::string& message) {
  if (ok) return;
  std::fprintf(stderr, "benchmark stopped: %s\n", message.c_str());
  std::exit(1);
}

}  // namespace ctkvr::bench

// lockstep compare: compares policies on the same workload, as a table and as JSON.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "cache_sim/base/files.hpp"
#include "cache_sim/compare/compare.hpp"
#include "cache_sim/compare/comparison_json.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "cache_sim/program/progress.hpp"
#include "cache_sim/report/comparison.hpp"
#include "cache_sim/report/page.hpp"

namespace lockstep::program {
namespace {

using cache_sim::ComparedPolicy;
using cache_sim::CompareRequest;
using cache_sim::Comparison;

struct CompareWords {
  CompareRequest request;
  std::string policies;
  std::vector<std::string> capacities;
  std::vector<std::string> hosts;
  std::string json_path;
  std::string html_path;
};

double share(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string milliseconds(const std::optional<cache_sim::TimeSummary>& times) {
  return times ? fmt::format("{:.0f}", static_cast<double>(times->mean) / 1e6) : "–";
}

/// Of the policies that have a host tier, what comes from it and what is copied.
void print_hosts(const Comparison& comparison) {
  constexpr std::string_view kRow = "{:<25} {:>10} {:>11} {:>11} {:>9} {:>9} {:>11} {:>11}\n";
  bool is_first = true;
  for (const ComparedPolicy& row : comparison.policies) {
    if (!row.host) continue;
    if (is_first) {
      note(kRow, "host tier", "capacity", "host KV", "host", "hit on", "hit on", "to host",
           "to device");
      note(kRow, "", "", "tokens", "states", "device", "host", "GiB", "GiB");
    }
    is_first = false;
    const cache_sim::PolicyMeasures& m = row.measures;
    note(kRow, row.policy, cache_sim::capacity_text(row.capacity), row.host->kv_tokens,
         row.host->state_slots,
         fmt::format("{:.6f}", share(m.hit_tokens - row.host->hit_tokens, m.input_tokens)),
         fmt::format("{:.6f}", share(row.host->hit_tokens, m.input_tokens)),
         cache_sim::gib_text(row.host->bytes_to_host),
         cache_sim::gib_text(row.host->bytes_to_device));
  }
}

void print_table(const CompareRequest& request, const Comparison& comparison) {
  constexpr std::string_view kRow =
      "{:<25} {:>10} {:>9} {:>9} {:>7} {:>8} {:>9} {:>13} {:>13} {:>8} {:>8} {:>8}\n";
  note("{}, model {}\n", request.workload, comparison.model.name);
  note(kRow, "policy", comparison.by_host ? "host tier" : "capacity", "hit", "hit", "saved", "kept",
       "never hit", "evicted KV", "dead KV", "preempt", "TTFT", "out");
  note(kRow, "", "", "of tokens", "of reqs", "PFLOP", "states", "states", "tokens", "tokens",
       "times", "mean ms", "tok/s");
  for (const ComparedPolicy& row : comparison.policies) {
    const cache_sim::PolicyMeasures& m = row.measures;
    const auto told = [&](std::int64_t count) {
      return row.tells_contents ? std::to_string(count) : "–";
    };
    const bool has_host = comparison.by_host && row.host_bytes;
    note(kRow, row.policy, cache_sim::capacity_text(has_host ? row.host_bytes : row.capacity),
         fmt::format("{:.6f}", share(m.hit_tokens, m.input_tokens)),
         fmt::format("{:.4f}", share(m.hit_requests, m.requests)),
         fmt::format("{:.1f}", m.flops_saved / 1e15), told(m.states), told(m.states_never_hit),
         told(m.evicted_tokens), told(m.dead_tokens), row.preemptions, milliseconds(row.ttft),
         row.ttft ? fmt::format("{:.1f}", row.output_tokens_per_s) : "–");
  }
  print_hosts(comparison);
  const cache_sim::Conclusions conclusions = cache_sim::conclusions_of(comparison);
  for (const auto* const sentences : {&conclusions.general, &conclusions.of_policies})
    for (const std::string& sentence : *sentences) print("- {}\n", sentence);
  note("digest={:016x}\n", comparison.digest());
}

std::string page_of(const CompareWords& words, const Comparison& comparison) {
  const cache_sim::ComparisonPlan plan{words.request.workload, "", words.request};
  return cache_sim::comparisons_page(
      {{"comparisons", cache_sim::Json::array({cache_sim::shown_comparison(plan, comparison)})}});
}

int run_compare(CompareWords words) {
  if (const Result<void> apart =
          expect_apart({words.request.workload}, {words.json_path, words.html_path});
      !apart)
    return refuse(apart.error());
  words.request.policies = cache_sim::parse_policies(words.policies);
  const auto capacities =
      cache_sim::parse_capacities(fmt::format("{}", fmt::join(words.capacities, ",")));
  if (!capacities) return refuse(capacities.error());
  words.request.capacities = *capacities;
  const auto hosts = cache_sim::parse_hosts(fmt::format("{}", fmt::join(words.hosts, ",")));
  if (!hosts) return refuse(hosts.error());
  words.request.hosts = *hosts;
  const Result<Comparison> comparison = [&] {
    const Progress progress("compare " + words.request.workload);
    return cache_sim::compare(words.request);
  }();
  if (!comparison) return refuse(comparison.error());
  print_table(words.request, *comparison);
  const auto write = [](const std::string& path, const auto& text) -> Result<void> {
    return path.empty() ? Result<void>{} : cache_sim::write_file(path, text());
  };
  const Result<void> written = write(words.json_path, [&] {
                                 return comparison_json(words.request, *comparison).dump(1) + "\n";
                               }).and_then([&] {
    return write(words.html_path, [&] { return page_of(words, *comparison); });
  });
  return written ? kExitPass : refuse(written.error());
}

}  // namespace

void add_compare(Command& app, int& status) {
  Command* const command =
      app.add_subcommand("compare", "serve the same workload under several policies");
  const auto words = std::make_shared<CompareWords>();
  command
      ->add_option("WORKLOAD", words->request.workload,
                   "a workload's file or name (lockstep list workloads)")
      ->required();
  command
      ->add_option(
          "--policies", words->policies,
          "P,… of lockstep list policies; state-every-N with a number of tokens for N; P@K=V with "
          "config fields of its own; hybrid for every policy for hybrid models")
      ->required();
  command
      ->add_option(
          "--capacity", words->capacities,
          "bytes of one pool for KV and states: 64GiB, 1000000000 or inf; several times (default: "
          "the pools of --config)")
      ->repeatable();
  command
      ->add_option("--host", words->hosts,
                   "bytes of a host tier beside the capacity, for policies that may have one; "
                   "P@host_share=V gives V per mille of them to states; several times with one "
                   "--capacity (default: the tiers of --config)")
      ->repeatable();
  command->add_option("--config", words->request.config,
                      "config fields: key=value,… (default: none)");
  command
      ->add_option("--model", words->request.model,
                   "whose bytes and FLOPs count (lockstep list models)")
      ->capture_default_str();
  command
      ->add_option("--cost", words->request.cost,
                   "what a step takes: model, or measured:CARD, from recorded times of kernels on "
                   "this card (measured:H200)")
      ->capture_default_str();
  command->add_option("--evidence", words->request.evidence, "the folder of these recorded times")
      ->capture_default_str();
  command->add_option("--limit", words->request.limit, "the first N requests alone (default: all)")
      ->number_from(1);
  command->add_output("--json", words->json_path, "write the comparison's data to this file");
  command->add_output("--html", words->html_path, "write a page about the comparison to this file");
  add_quiet(*command);
  end_help(*command,
           {{kExitPass, "the table is complete; nothing is checked"},
            {kExitBadInput, "bad usage or bad input; nothing is written"},
            {kExitEnvironment, "the environment: a full disk"}},
           {"lockstep compare sessions:requests=100 --policies kv-bound,radix,sglang-no-buffer "
            "--capacity 8GiB --capacity 16GiB"});
  command->callback([words, &status] { status = run_compare(*words); });
}

}  // namespace lockstep::program

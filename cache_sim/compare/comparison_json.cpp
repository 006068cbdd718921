#include "cache_sim/compare/comparison_json.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cache_sim/base/files.hpp"

namespace lockstep::cache_sim {
namespace {

Json times_json(const TimeSummary& times) {
  return {{"mean_ns", times.mean}, {"median_ns", times.median}, {"p99_ns", times.p99}};
}

Json cost_json(const MeasuredLayers& layers) {
  Json json = {{"gpu", layers.gpu},
               {"read_gbps", static_cast<double>(layers.bytes_per_microsecond) / 1000},
               {"matmul_tflops", static_cast<double>(layers.flops_per_nanosecond) / 1000}};
  for (const KernelEvidence& one : layers.evidence)
    json["evidence"].push_back({{"operation", one.operation},
                                {"file", one.file},
                                {"gpu", one.gpu},
                                {"commit", one.commit},
                                {"date", one.date},
                                {"is_used", one.is_used}});
  return json;
}

}  // namespace

Json compared_json(const ComparedPolicy& row, const Model& model) {
  const PolicyMeasures& m = row.measures;
  Json json = {{"policy", row.policy}};
  json["capacity"] = row.capacity ? Json(*row.capacity) : Json("inf");
  if (row.capacity) json["kv_tokens"] = row.kv_tokens;
  if (row.capacity) json["state_slots"] = row.state_slots;
  if (row.host_bytes) json["host_bytes"] = *row.host_bytes;
  if (row.blocks != 0) json["blocks"] = row.blocks;
  if (!row.chosen.empty()) json["chosen"] = row.chosen;
  json["requests"] = m.requests;
  json["hit_requests"] = m.hit_requests;
  json["request_hit_ratio"] = rounded_ratio(m.hit_requests, m.requests);
  json["input_tokens"] = m.input_tokens;
  json["hit_tokens"] = m.hit_tokens;
  json["hit_ratio"] = rounded_ratio(m.hit_tokens, m.input_tokens);
  json["flops_saved"] = m.flops_saved;
  if (row.tells_contents) {
    json["stored_tokens"] = m.stored_tokens;
    json["dead_tokens"] = m.dead_tokens;
    json["states"] = m.states;
    json["state_bytes"] = m.states * model.state_bytes;
    json["states_admitted"] = m.states_admitted;
    json["states_never_hit"] = m.states_never_hit;
    json["evictions"] = {{"kv_tokens", m.evicted_tokens}, {"states", m.evicted_states}};
  }
  if (row.host)
    json["host"] = {{"kv_tokens", row.host->kv_tokens},
                    {"state_slots", row.host->state_slots},
                    {"hit_tokens", row.host->hit_tokens},
                    {"bytes_to_host", row.host->bytes_to_host},
                    {"bytes_to_device", row.host->bytes_to_device}};
  if (!row.scheduled) return json;
  json["preemptions"] = row.preemptions;
  json["refused"] = row.refused_requests;
  if (row.ttft) json["ttft"] = times_json(*row.ttft);
  if (row.e2e) json["e2e"] = times_json(*row.e2e);
  if (row.ttft) json["output_tokens_per_s"] = row.output_tokens_per_s;
  if (row.idle_share) json["idle_share"] = *row.idle_share;
  if (row.step_time() != 0) json["measured_share"] = row.measured_share();
  for (const CostPart& part : row.cost_parts)
    json["step_time"].push_back(
        {{"part", part.name}, {"measured_ns", part.measured}, {"modelled_ns", part.modelled}});
  return json;
}

Json comparison_json(const CompareRequest& request, const Comparison& comparison) {
  const Model& model = comparison.model;
  Json json = {{"lockstep", 1}, {"command", "compare"}};
  json["workload"] = {{"file", request.workload}};
  if (request.limit != 0) json["workload"]["limit"] = request.limit;
  json["model"] = {{"name", model.name},
                   {"token_bytes", model.token_bytes},
                   {"state_bytes", model.state_bytes},
                   {"flops_per_token", model.flops_per_token},
                   {"flops_per_pair", model.flops_per_pair},
                   {"weight_bytes", model.weight_bytes}};
  if (comparison.measured != nullptr) json["cost"] = cost_json(*comparison.measured);
  json["config"] = request.config;
  json["commit"] = commit();
  json["digest"] = fmt::format("{:016x}", comparison.digest());
  json["verdict"] = "unchecked";  // policies run alone, and their replies are not checked
  json["findings"] = Json::array();
  json["policies"] = Json::array();
  for (const ComparedPolicy& row : comparison.policies)
    json["policies"].push_back(compared_json(row, model));
  json["timing"] = {{"wall_s", comparison.wall_s}, {"date", today()}};
  return json;
}

}  // namespace lockstep::cache_sim

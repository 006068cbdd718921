// vLLM's RequestOutput, its fields as JSON.
#include <nlohmann/json.hpp>

#include "cache_sim/logs/log_fields.hpp"

namespace lockstep::cache_sim {
namespace {

Result<LoggedRequest> read_vllm(const Record& line) {
  const Result<std::vector<Record>> outputs = line.objects("outputs");
  if (!outputs) return tl::unexpected(outputs.error());
  if (outputs->size() != 1) return line.error("outputs", "one output a request is understood");
  return read_request(line, {line, "request_id"}, {line, "prompt_token_ids"},
                      {outputs->front(), "token_ids"}, {line, "num_cached_tokens"});
}

const Registration<LogFormat> kVllm{
    {.name = "vllm",
     .summary = "vLLM's request outputs",
     .recognises = [](const nlohmann::json& first) { return first.contains("num_cached_tokens"); },
     .read = read_vllm}};

}  // namespace
}  // namespace lockstep::cache_sim

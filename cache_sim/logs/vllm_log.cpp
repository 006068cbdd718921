// vLLM's RequestOutput, its fields as JSON.
#include <nlohmann/json.hpp>

#include "cache_sim/logs/log_fields.hpp"

namespace lockstep::cache_sim {
namespace {

Result<LoggedRequest> read_vllm(const Record& line) {
  LoggedRequest request;
  const Result<std::string> id = read_id(line, "request_id");
  if (!id) return tl::unexpected(id.error());
  request.id = *id;
  const Result<std::vector<Record>> outputs = line.objects("outputs");
  if (!outputs) return tl::unexpected(outputs.error());
  if (outputs->size() != 1) return line.error("outputs", "one output a request is understood");
  if (const auto read =
          read_tokens(line, "prompt_token_ids", outputs->front(), "token_ids", request);
      !read)
    return tl::unexpected(read.error());
  const auto cached = line.integer("num_cached_tokens", 0, Tokens::kMaxSize);
  if (!cached) return tl::unexpected(cached.error());
  request.cached = *cached;
  if (const auto read = read_marks(line, request); !read) return tl::unexpected(read.error());
  return request;
}

const Registration<LogFormat> kVllm{
    {.name = "vllm",
     .summary = "vLLM's request outputs",
     .recognises = [](const nlohmann::json& first) { return first.contains("num_cached_tokens"); },
     .read = read_vllm}};

}  // namespace
}  // namespace lockstep::cache_sim

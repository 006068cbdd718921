// Lockstep's own format of logs.
#include <nlohmann/json.hpp>

#include "cache_sim/logs/log_fields.hpp"

namespace lockstep::cache_sim {
namespace {

Result<LoggedRequest> read_own(const Record& line) {
  LoggedRequest request;
  const Result<std::string> id = read_id(line, "id");
  if (!id) return tl::unexpected(id.error());
  request.id = *id;
  if (const auto read = read_tokens(line, "prompt", line, "output", request); !read)
    return tl::unexpected(read.error());
  const auto cached = line.integer("cached", 0, Tokens::kMaxSize);
  if (!cached) return tl::unexpected(cached.error());
  request.cached = *cached;
  if (const auto read = read_marks(line, request); !read) return tl::unexpected(read.error());
  return request;
}

const Registration<LogFormat> kOwn{
    {.name = "lockstep",
     .summary = "Lockstep's log",
     .recognises = [](const nlohmann::json& first) { return first.contains("cached"); },
     .read = read_own}};

}  // namespace
}  // namespace lockstep::cache_sim

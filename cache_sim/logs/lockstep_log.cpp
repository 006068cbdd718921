// Lockstep's own format of logs.
#include <nlohmann/json.hpp>

#include "cache_sim/logs/log_fields.hpp"

namespace lockstep::cache_sim {
namespace {

Result<LoggedRequest> read_own(const Record& line) {
  return read_request(line, {line, "id"}, {line, "prompt"}, {line, "output"}, {line, "cached"});
}

const Registration<LogFormat> kOwn{
    {.name = "lockstep",
     .summary = "Lockstep's log",
     .recognises = [](const nlohmann::json& first) { return first.contains("cached"); },
     .read = read_own}};

}  // namespace
}  // namespace lockstep::cache_sim

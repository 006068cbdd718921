#include "cache_sim/program/sarif.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

namespace lockstep::program {
namespace {

using Json = nlohmann::ordered_json;

/// A path as the reference that a URI asks for: what is no letter, digit or `/._~-` is escaped.
std::string uri_of(const std::string& path) {
  std::string uri = path.starts_with("/") ? "file://" : "";
  for (const char c : path) {
    const bool is_plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                          (c >= '0' && c <= '9') ||
                          std::string_view("/._~-").find(c) != std::string_view::npos;
    uri += is_plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return uri;
}

}  // namespace

std::string sarif_text(const std::vector<SarifResult>& results) {
  std::set<FindingKind> kinds;
  Json shown = Json::array();
  for (const SarifResult& one : results) {
    kinds.insert(one.kind);
    Json place = {{"artifactLocation", {{"uri", uri_of(one.file)}}}};
    if (one.line > 0) place["region"] = {{"startLine", one.line}};
    shown.push_back({{"ruleId", to_string(one.kind)},
                     {"level", "error"},
                     {"message", {{"text", one.text}}},
                     {"locations", Json::array({{{"physicalLocation", place}}})}});
  }
  Json rules = Json::array();
  for (const FindingKind kind : kinds)
    rules.push_back({{"id", to_string(kind)}, {"shortDescription", {{"text", meaning(kind)}}}});
  const Json driver = {{"name", "Lockstep"}, {"version", LOCKSTEP_VERSION}, {"rules", rules}};
  const Json run = {{"tool", {{"driver", driver}}}, {"results", shown}};
  const Json log = {{"$schema", "https://json.schemastore.org/sarif-2.1.0.json"},
                    {"version", "2.1.0"},
                    {"runs", Json::array({run})}};
  return log.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep::program

#include "cache_sim/program/annotations.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

#include "cache_sim/base/files.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/output.hpp"

namespace lockstep::program {
namespace {

using Json = nlohmann::ordered_json;

/// A path as a URI reference: every byte that is no letter, digit or one of `/._~-` is escaped.
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

/// The text of a GitHub workflow command with its special signs escaped; in a property, also the
/// signs that end it.
std::string github_escaped(std::string_view text, std::string_view signs) {
  std::string escaped;
  for (const char c : text)
    escaped += signs.find(c) == std::string_view::npos
                   ? std::string(1, c)
                   : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  return escaped;
}

}  // namespace

std::string sarif_text(const std::vector<Annotation>& annotations) {
  std::set<FindingKind> kinds;
  Json shown = Json::array();
  for (const Annotation& one : annotations) {
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

std::string github_text(const std::vector<Annotation>& annotations) {
  constexpr std::string_view kMessage = "%\r\n", kProperty = "%\r\n:,";
  std::string lines;
  for (const Annotation& one : annotations)
    lines += fmt::format("::error file={}{},title={}::{}\n", github_escaped(one.file, kProperty),
                         one.line > 0 ? fmt::format(",line={}", one.line) : "", to_string(one.kind),
                         github_escaped(one.text, kMessage));
  return lines;
}

void AnnotationOptions::add_to(Command& command) {
  command.add_output("--sarif", sarif_path, "write the findings as SARIF to this file");
  command.add_flag("--github", github,
                   "also print each finding as an `::error` line, which GitHub Actions shows "
                   "beside its file");
}

void AnnotationOptions::print(const std::vector<Annotation>& annotations) const {
  if (github) print_text(github_text(annotations));
}

Result<void> AnnotationOptions::write(const std::vector<Annotation>& annotations) const {
  if (sarif_path.empty()) return {};
  return cache_sim::write_file(sarif_path, sarif_text(annotations));
}

}  // namespace lockstep::program

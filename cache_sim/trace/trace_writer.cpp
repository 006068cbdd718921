#include "cache_sim/trace/trace_writer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "reference/base/overloaded.hpp"

namespace lockstep::cache_sim {
namespace {

std::string optional_time(std::string_view field, Nanoseconds time) {
  return time < 0 ? "" : fmt::format(" {}={}", field, time_text(time));
}

std::string optional_name(std::string_view field, Name name) {
  return name.exists() ? fmt::format(" {}={}", field, name.text()) : "";
}

std::string request_text(const RequestSpec& spec) {
  std::string text = "request";
  if (!spec.accept.empty()) text += fmt::format(" accept={}", fmt::join(spec.accept, ","));
  text += optional_time("at", spec.at);
  if (spec.branches != 1) text += fmt::format(" branches={}", spec.branches);
  if (!spec.drafts.empty()) text += fmt::format(" drafts={}", fmt::join(spec.drafts, ","));
  if (spec.external != 0) text += fmt::format(" external={}", spec.external);
  text += optional_name("id", spec.id);
  if (!spec.images.empty()) text += " images=" + images_text(spec.images);
  text += optional_name("lora", spec.lora);
  text += spec.stops ? " output=" + spec.tokens.slice(spec.prompt_size, spec.tokens.size()).text()
                     : fmt::format(" output={}", spec.output_size());
  if (spec.overrun != 0) text += fmt::format(" overrun={}", spec.overrun);
  if (spec.priority != 0) text += fmt::format(" priority={}", spec.priority);
  if (spec.rank >= 0) text += fmt::format(" rank={}", spec.rank);
  text += optional_name("salt", spec.salt) + optional_name("session", spec.session);
  return text + " tokens=" + spec.tokens.prefix(spec.prompt_size).text();
}

}  // namespace

std::string statement_text(const Statement& statement) {
  std::string text = std::visit(
      Overloaded{[](const Operation& operation) { return operation.text(); },
                 [](const RequestSpec& spec) { return request_text(spec); },
                 [](const Intervention& stop) {
                   return fmt::format("{}{}{} id={}", stop.retract ? "retract" : "abort",
                                      optional_time("at", stop.at), stop.during ? " during=1" : "",
                                      stop.id.text());
                 },
                 [](const CloseSession& close) { return "close session=" + close.session.text(); },
                 [](const RunStatement& run) {
                   return "run" + (run.steps < 0 ? "" : fmt::format(" steps={}", run.steps)) +
                          optional_time("until", run.until);
                 },
                 [](const Expect& expect) { return "expect id=" + expect.id.text(); }},
      statement.what);
  text += '\n';
  if (statement.answer.empty()) return text;
  text += "----\n";
  for (std::size_t i = 0; i < statement.answer.size(); ++i)
    text += fmt::format("{}{}={}", i == 0 ? "" : " ", statement.answer[i].field,
                        statement.answer[i].value);
  return text + '\n';
}

std::string trace_text(const Trace& trace) {
  std::string text;
  for (const std::string& line : trace.description) text += "# " + line + '\n';
  std::string config;
  for (const std::string& field : trace.config.changed())
    config += fmt::format(" {}={}", field, *trace.config.find(field));
  if (!config.empty()) text += "config" + config + '\n';
  for (const Statement& statement : trace.statements) text += statement_text(statement);
  return text;
}

}  // namespace lockstep::cache_sim

#include "cache_sim/trace/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <set>

#include "cache_sim/base/input.hpp"
#include "cache_sim/trace/scheduler_verbs.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/shell_words.hpp"
#include "reference/protocol/host_tier.hpp"
#include "reference/protocol/speculation.hpp"

namespace lockstep::cache_sim {
namespace {

/// An output that is given as a length has a document of its own. These documents are numbered
/// above every name of up to six letters.
constexpr Document kOutputDocuments = Document{1} << 30;
constexpr std::int64_t kMostBranches = 1024;  // the same limit holds for overrun=

Result<std::vector<std::int64_t>> parse_list(std::string_view text, std::int64_t low) {
  std::vector<std::int64_t> list;
  for (;;) {
    const std::size_t comma = std::min(text.find(','), text.size());
    const Result<std::int64_t> number = parse_integer(text.substr(0, comma), low, Tokens::kMaxSize);
    if (!number) return tl::unexpected(number.error());
    list.push_back(*number);
    if (comma == text.size()) return list;
    text.remove_prefix(comma + 1);
  }
}

/// Parses one file, and remembers from earlier lines what later lines are checked against.
class Reader {
 public:
  explicit Reader(const std::string& path) { trace_.path = path; }

  Result<Trace> read(std::string_view text) {
    if (text.empty()) return fail(trace_.path + ": the file is empty");
    trace_.scheduler_level = has_request(text);
    for (std::size_t at = 0; at < text.size();) {
      ++line_;
      const std::size_t end = text.find('\n', at);
      if (std::min(end, text.size()) - at > kMaxLineSize)
        return error("the line is longer than 1 MiB");
      if (const Result<void> done = read_line(text.substr(at, end - at)); !done)
        return error(done.error().text);
      if (end == std::string_view::npos) break;  // editors leave the last line without a newline
      at = end + 1;
    }
    if (awaiting_ != Awaiting::nothing)
      return error("the file ends where the answer of a verb is due");
    if (trace_.statements.empty()) return fail(trace_.path + ": the file holds no operation");
    return std::move(trace_);
  }

 private:
  enum class Awaiting { nothing, answer };

  tl::unexpected<Error> error(const std::string& text) const {
    return fail(fmt::format("{}:{}: {}", trace_.path, line_, text));
  }

  /// A file that has a `request` line anywhere is at scheduler level from its first line on.
  static bool has_request(std::string_view text) {
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      std::string_view line = text.substr(at, end - at);
      line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
      if (line.starts_with("request") && (line.size() == 7 || line[7] == ' ' || line[7] == '\t'))
        return true;
      at = end + 1;
    }
    return false;
  }

  Result<void> read_line(std::string_view text) {
    if (!text.empty() && text.back() == '\r') return fail("the line ends with a carriage return");
    const bool blank = text.find_first_not_of(" \t") == std::string_view::npos;
    if (awaiting_ == Awaiting::answer) {
      if (blank || text.starts_with("#")) return fail("the answer stands in the line after ----");
      return read_answer(text);
    }
    if (blank) {
      after_verb_ = false;
      return {};
    }
    if (text.starts_with("#")) {
      after_verb_ = false;
      return read_comment(text.substr(1));
    }
    if (text == "----") {
      if (!after_verb_) return fail("---- stands after a verb line, and none is before it");
      after_verb_ = false;
      awaiting_ = Awaiting::answer;
      return {};
    }
    return parse_line(text).and_then([&](const Line& line) { return read_verb(line); });
  }

  Result<void> read_comment(std::string_view text) {
    for (const char c : text)
      if (static_cast<unsigned char>(c) < 0x20 && c != '\t')
        return fail(
            fmt::format("the control character {} cannot stand in a comment", static_cast<int>(c)));
    text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
    if (text.starts_with("run:")) {
      text.remove_prefix(4);
      text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
      if (!text.starts_with("lockstep ")) return fail("# run: is followed by a lockstep command");
      if (const auto words = split_words(text); !words) return fail("# run: " + words.error().text);
      trace_.runs.push_back({line_, std::string(text), std::nullopt});
      return {};
    }
    if (text.starts_with("finds:")) {
      text.remove_prefix(6);
      text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
      const auto kind = finding_kind_from(text);
      if (!kind)
        return fail(fmt::format("# finds: `{}` is no kind of finding", text.substr(0, 60)));
      if (trace_.runs.empty() || trace_.runs.back().finds)
        return fail("# finds: stands after a # run: line of its own");
      trace_.runs.back().finds = kind;
      return {};
    }
    if (text.empty()) return {};
    const bool is_file_name = text.ends_with(".trace") && text.find(' ') == std::string_view::npos;
    if (trace_.title.empty() && !is_file_name) trace_.title = text;
    if (!is_file_name) trace_.description.emplace_back(text);
    return {};
  }

  Result<void> read_answer(std::string_view text) {
    const Result<Line> line = parse_line(text, false);
    if (!line) return tl::unexpected(line.error());
    if (line->fields.empty()) return fail("the answer has no field");
    Statement& statement = trace_.statements.back();
    for (const auto& [key, value] : line->fields) {
      if (key != "refused" && !reply_field_from(key))
        return fail(fmt::format("no answer has a field `{}`", key.substr(0, 60)));
      if (value.empty()) return fail(fmt::format("field {} has no value", key));
      statement.answer.push_back({std::string(key), std::string(value)});
    }
    statement.answer_line = line_;
    awaiting_ = Awaiting::nothing;
    const auto* const told = std::get_if<Operation>(&statement.what);
    if (told != nullptr && told->verb == Verb::admit && line->fields[0].first == "refused" &&
        !has_disk(trace_.config))
      running_.erase(told->id.text());  // a refused admission leaves its name
    return {};
  }

  Result<void> read_verb(const Line& line) {
    if (line.verb == "config") return read_config(line);
    after_verb_ = true;
    Result<decltype(Statement::what)> what = fail("");
    if (line.verb == "request")
      what = read_request(line);
    else if (line.verb == "run")
      what = read_run(line);
    else if (line.verb == "expect")
      what = read_expect(line);
    else if (line.verb == "close")
      what = read_close(line);
    else if (line.verb == "retract" || (line.verb == "abort" && trace_.scheduler_level))
      what = read_intervention(line);
    else
      what = read_operation(line);
    if (!what) return tl::unexpected(what.error());
    if (trace_.statements.size() == kMaxStatements)
      return fail(
          fmt::format("a trace has at most {} statements; `lockstep list workloads` shows "
                      "the formats for more",
                      kMaxStatements));
    Statement statement;
    statement.line = line_;
    statement.what = std::move(*what);
    trace_.statements.push_back(std::move(statement));
    return {};
  }

  Result<void> read_config(const Line& line) {
    after_verb_ = false;
    if (!trace_.statements.empty()) return fail("config stands before the first operation");
    for (const auto& [key, value] : line.fields) {
      if (Result<void> set = trace_.config.set(key, value); !set) return set;
      if (const auto [first, is_new] = trace_.config_lines.emplace(key, line_); !is_new)
        return fail(fmt::format("field {}: line {} sets it, too", key, first->second));
    }
    return {};
  }

  /// Calls `use` for each field of the line. Unknown and missing fields are errors.
  template <class Use>
  Result<void> each_field(const Line& line, Use use) {
    const SchedulerVerb& verb = scheduler_verb(line.verb);
    for (const auto& [key, value] : line.fields) {
      const Result<void> used =
          verb.has(key) ? use(key, value) : fail(fmt::format("{} has no such field", verb.name));
      if (!used) return fail(fmt::format("field {}: {}", key.substr(0, 60), used.error().text));
    }
    for (const std::string_view name : verb.required)
      if (!line.find(name)) return fail(fmt::format("{} needs the field {}", line.verb, name));
    return {};
  }

  static Result<void> read_number(std::string_view value, std::int64_t low, std::int64_t high,
                                  std::int64_t& into) {
    return parse_integer(value, low, high).map([&](std::int64_t number) { into = number; });
  }

  static Result<void> read_name(std::string_view value, Name& into) {
    if (value.empty()) return fail("is empty");
    into = Name::intern(value);
    return {};
  }

  /// A time that is not before the latest time of its kind. (Arrivals may lie after the end of a
  /// `run`.)
  static Result<void> read_time(std::string_view value, Nanoseconds& latest, Nanoseconds& into) {
    const Result<Nanoseconds> time = parse_time(value);
    if (!time) return tl::unexpected(time.error());
    if (*time < latest)
      return fail(
          fmt::format("{} is before {} of an earlier line", time_text(*time), time_text(latest)));
    latest = into = *time;
    return {};
  }

  Result<void> read_known_id(std::string_view value, Name& into) {
    if (Result<void> named = read_name(value, into); !named) return named;
    if (!ids_.contains(std::string(value)))
      return fail(fmt::format("no request is called `{}` before this line", value.substr(0, 60)));
    return {};
  }

  /// Images of a request. An image without a name is identified by its tokens in the prompt.
  static Result<void> read_images(std::string_view list, std::vector<ImageSpan>& into) {
    Result<std::vector<ImageSpan>> images = parse_images(list);
    if (!images) return tl::unexpected(images.error());
    into = std::move(*images);
    return {};
  }

  /// A verification keeps at most the drafts on the longest way of its tree, and one token more.
  static Result<void> check_accepted(const RequestSpec& spec) {
    if (spec.accept.size() != spec.drafts.size())
      return fail("accept and drafts have a number each per verification");
    for (std::size_t i = 0; i < spec.accept.size(); ++i)
      if (spec.accept[i] > spec.most_kept(spec.drafts[i]))
        return fail(fmt::format(
            "field accept: {} kept of {}{} and one more", spec.accept[i],
            counted(spec.drafts[i], "draft"),
            spec.branches == 1
                ? ""
                : fmt::format(" on the longest way, {}", spec.most_kept(spec.drafts[i]) - 1)));
    return {};
  }

  Result<decltype(Statement::what)> read_request(const Line& line) {
    RequestSpec spec;
    std::string_view output;
    std::optional<Speculation> speculation;
    const Result<void> read =
        each_field(line, [&](std::string_view key, std::string_view value) -> Result<void> {
          if (key == "id") {
            if (!ids_.emplace(value).second)
              return fail(
                  fmt::format("a request `{}` stands before this line", value.substr(0, 60)));
            return read_name(value, spec.id);
          }
          if (key == "tokens")
            return parse_tokens(value).map([&](const Tokens& t) { spec.tokens = t; });
          if (key == "output") return void(output = value), Result<void>{};
          if (key == "at") return read_time(value, latest_at_, spec.at);
          if (key == "accept")
            return parse_list(value, 1).map([&](const auto& list) { spec.accept = list; });
          if (key == "drafts")
            return parse_list(value, 0).map([&](const auto& list) { spec.drafts = list; });
          if (key == "priority")
            return parse_integer(value, -kMostInteger, kMostInteger).map([&](std::int64_t v) {
              spec.priority = v;
            });
          if (key == "session") return read_name(value, spec.session);
          if (key == "salt") return read_name(value, spec.salt);
          if (key == "lora") return read_name(value, spec.lora);
          if (key == "rank")
            return parse_integer(value, 0, trace_.config.ranks - 1).map([&](std::int64_t v) {
              spec.rank = v;
            });
          if (key == "external") return read_number(value, 0, kMostInteger, spec.external);
          if (key == "speculate")
            return parse_speculation(value).map([&](const Speculation& s) { speculation = s; });
          if (key == "branches") return read_number(value, 1, kMostBranches, spec.branches);
          if (key == "overrun") return read_number(value, 0, kMostBranches, spec.overrun);
          if (key == "images") return read_images(value, spec.images);
          return fail("request has no such field");
        });
    if (!read) return tl::unexpected(read.error());
    if (spec.tokens.empty()) return fail("field tokens: a request has at least one token");
    if (const Result<void> kept = check_accepted(spec); !kept) return tl::unexpected(kept.error());
    spec.prompt_size = spec.tokens.size();
    if (!spec.images.empty() && spec.images.back().end() > spec.prompt_size)
      return fail(fmt::format("field images: they end with the prompt's {}",
                              counted(spec.prompt_size, "token")));
    spec.stops = !output.empty() && (output[0] < '0' || output[0] > '9') && output[0] != '-';
    const std::uint32_t room = Tokens::kMaxSize - spec.prompt_size;
    const Result<Tokens> sampled =
        spec.stops ? parse_tokens(output) : parse_integer(output, 1, room).map([&](std::int64_t n) {
          const auto number = static_cast<Document>(trace_.statements.size());
          return Tokens::of_document(kOutputDocuments + number, 0, static_cast<std::uint32_t>(n));
        });
    if (!sampled) return fail("field output: " + sampled.error().text);
    if (sampled->empty() || sampled->size() > room)
      return fail(
          "field output: prompt and output have at most 2^24 tokens, and at least one is sampled");
    spec.tokens = spec.tokens.followed_by(*sampled);
    if (speculation && !spec.accept.empty())
      return fail("field speculate: it stands without accept and drafts");
    if (speculation) speculate(spec, *speculation, ids_.size());
    return spec;
  }

  Result<decltype(Statement::what)> read_intervention(const Line& line) {
    if (!trace_.scheduler_level)
      return fail(fmt::format("{} is for files with request lines", line.verb));
    Intervention stop;
    stop.retract = line.verb == "retract";
    const Result<void> read =
        each_field(line, [&](std::string_view key, std::string_view value) -> Result<void> {
          if (key == "id") return read_known_id(value, stop.id);
          if (key == "at") return read_time(value, latest_at_, stop.at);
          if (key == "during" && !stop.retract)
            return parse_integer(value, 0, 1).map([&](std::int64_t v) { stop.during = v != 0; });
          return fail(fmt::format("{} has no such field", line.verb));
        });
    if (!read) return tl::unexpected(read.error());
    if (stop.during && stop.at >= 0) return fail("during=1 stands without at");
    return stop;
  }

  Result<decltype(Statement::what)> read_close(const Line& line) {
    if (!trace_.scheduler_level) return fail("close is for files with request lines");
    CloseSession close;
    const Result<void> read =
        each_field(line, [&](std::string_view key, std::string_view value) -> Result<void> {
          if (key == "session") return read_name(value, close.session);
          return fail("close has no such field");
        });
    if (!read) return tl::unexpected(read.error());
    return close;
  }

  Result<decltype(Statement::what)> read_run(const Line& line) {
    if (!trace_.scheduler_level) return fail("run is for files with request lines");
    RunStatement run;
    const Result<void> read =
        each_field(line, [&](std::string_view key, std::string_view value) -> Result<void> {
          if (key == "until")
            return read_time(value, latest_until_, run.until).map([&] {
              latest_at_ = std::max(latest_at_, run.until);  // nothing arrives in the past
            });
          if (key == "steps")
            return parse_integer(value, 0, kMostInteger).map([&](std::int64_t v) {
              run.steps = v;
            });
          return fail("run has no such field");
        });
    if (!read) return tl::unexpected(read.error());
    return run;
  }

  Result<decltype(Statement::what)> read_expect(const Line& line) {
    Expect expect;
    const Result<void> read =
        each_field(line, [&](std::string_view key, std::string_view value) -> Result<void> {
          if (key == "id") return read_known_id(value, expect.id);
          return fail("expect has no such field");
        });
    if (!read) return tl::unexpected(read.error());
    return expect;
  }

  Result<decltype(Statement::what)> read_operation(const Line& line) {
    Result<Operation> operation = parse_operation(line);
    if (!operation) return tl::unexpected(operation.error());
    const Verb verb = operation->verb;
    if (trace_.scheduler_level && verb != Verb::evict && verb != Verb::flush && verb != Verb::check)
      return fail(fmt::format("{} cannot stand in a file with request lines", line.verb));
    const std::string& id = operation->id.text();
    if (verb == Verb::admit) {
      ids_.insert(id);
      // With a disk, a refused admission asks again; only subjects know that it was
      // refused.
      if (!running_.insert(id).second && !has_disk(trace_.config))
        return fail(fmt::format("field id: request `{}` is admitted already", id));
    } else if (!id.empty()) {
      if (!running_.contains(id))
        return fail(fmt::format("field id: no admitted request is called `{}` here", id));
      if (verb == Verb::finish || verb == Verb::abort || verb == Verb::preempt) running_.erase(id);
    }
    if (verb == Verb::clone) {
      ids_.insert(operation->as.text());
      if (!running_.insert(operation->as.text()).second)
        return fail(
            fmt::format("field as: request `{}` is admitted already", operation->as.text()));
    }
    return std::move(*operation);
  }

  Trace trace_;
  int line_ = 0;
  Awaiting awaiting_ = Awaiting::nothing;
  bool after_verb_ = false;
  Nanoseconds latest_at_ = 0;
  Nanoseconds latest_until_ = 0;
  std::set<std::string, std::less<>> ids_;
  std::set<std::string, std::less<>> running_;
};

}  // namespace

Result<Trace> parse_trace(std::string_view text, const std::string& path) {
  return Reader(path).read(text);
}

Result<Trace> read_trace(const std::string& path) {
  Result<std::ifstream> opened = open_input(path);
  if (!opened) return tl::unexpected(opened.error());
  std::ifstream& file = *opened;
  // A line longer than the limit is refused before the rest of the file is read.
  std::string text;
  std::size_t line_start = 0;
  std::vector<char> block(1 << 16);
  while (file.read(block.data(), static_cast<std::streamsize>(block.size())) || file.gcount() > 0) {
    const std::size_t from = text.size();
    text.append(block.data(), static_cast<std::size_t>(file.gcount()));
    const std::size_t last = text.rfind('\n');
    if (last != std::string::npos && last >= from) line_start = last + 1;
    if (text.size() - line_start > kMaxLineSize + block.size()) break;
    if (text.size() > kMaxTraceSize) return fail(path + ": the file is longer than 1 GiB");
  }
  if (file.bad()) return fail(path + ": cannot be read to its end");
  if (text.empty()) return fail(path + ": the file is empty");
  return parse_trace(text, path);
}

}  // namespace lockstep::cache_sim

#include "cache_sim/check/exec_subject.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "reference/base/child_process.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/printable.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {
namespace {

using std::chrono::milliseconds;
// Keeps the deadline within the range of the clock.
constexpr milliseconds kTimeoutMax = std::chrono::hours(24 * 365);

Result<std::string> greeting(const Config& config) {
  std::string line = "hello protocol=1";
  for (const auto& [name, value] : config.fields()) {
    if (std::ranges::any_of(value, [](unsigned char c) { return c <= ' ' || c == 0x7F; }))
      return fail(fmt::format("config field {}: `{}` holds a blank, and no child can read that",
                              name, printable(value)));
    line.append(" ").append(name).append("=").append(value);
  }
  return line;
}

/// Whether a shell would find a program of this name.
bool is_program(const std::string& name) {
  if (name.find('=') != std::string::npos) return false;  // an assignment that precedes the command
  if (name.find('/') != std::string::npos) return true;
  const char* const path = std::getenv("PATH");
  std::stringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');)
    if (::access(fmt::format("{}/{}", folder, name).c_str(), X_OK) == 0) return !name.empty();
  return false;
}

/// The text for the shell. Where the command starts one program and nothing else, `exec` makes the
/// shell become that program; otherwise the shell would hold the pipes open after the program has
/// closed them.
std::string shell_command(const std::string& command) {
  const bool is_plain = command.find_first_of(";&|<>()`\n") == std::string::npos;
  const std::size_t begin = std::min(command.find_first_not_of(' '), command.size());
  const bool is_one =
      is_plain && is_program(command.substr(begin, command.find(' ', begin) - begin));
  return is_one ? "exec " + command : command;
}

/// The reply without these fields.
Reply without(const Reply& reply, std::initializer_list<ReplyField> dropped) {
  Reply rest = Reply::refusal(reply.refused);
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
    const auto field = static_cast<ReplyField>(i);
    if (reply.has(field) && std::ranges::find(dropped, field) == dropped.end())
      rest.set(field, reply.get(field));
  }
  return rest;
}

constexpr std::string_view kGreeting[] = {"protocol", "levels", "labels", "again", "takes",
                                          "honours",  "rehits", "chunks", "locks"};

// Fields of a child's answer that are not fields of Reply.
constexpr std::string_view kOfItself[] = {
    "violation=", "wrong=", "raised=", "state_tokens=", "conv_tokens=", "cached_tokens=", "salt="};
constexpr std::string_view kViolation = kOfItself[0], kWrong = kOfItself[1], kRaised = kOfItself[2],
                           kSalt = kOfItself[6];
constexpr std::size_t kOfAnyAnswer = 3;  // the others are of answers to admit and match

/// An answer as it was read: the fields of the reply, and the other fields that a child can send.
struct Answer {
  std::string reply;
  std::optional<std::string> violation;  ///< violation=TEXT, the rest of the line
  std::optional<std::string> wrong;      ///< wrong=TEXT, the rest of the line
  std::optional<std::string> raised;     ///< raised=TEXT, the rest of the line
  /// state_tokens=, conv_tokens= and cached_tokens=: the tokens for which the slot or the hit in
  /// this field of the reply stands, by the child.
  std::vector<std::pair<ReplyField, std::string>> stands_for;
  std::optional<std::string> salt;  ///< under which these were computed
};

Answer split(std::string_view text) {
  constexpr std::pair<std::string_view, ReplyField> kLabels[] = {
      {kOfItself[3], ReplyField::state},
      {kOfItself[4], ReplyField::conv},
      {kOfItself[5], ReplyField::cached}};
  Answer answer;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    std::string_view word = text.substr(0, end);
    if (word.starts_with(kViolation)) {
      answer.violation = text.substr(kViolation.size());
      break;
    }
    if (word.starts_with(kWrong)) {
      answer.wrong = text.substr(kWrong.size());
      break;
    }
    if (word.starts_with(kRaised)) {
      answer.raised = text.substr(kRaised.size());
      break;
    }
    text.remove_prefix(std::min(end + 1, text.size()));
    if (word.starts_with(kSalt)) {
      answer.salt = word.substr(kSalt.size());
      continue;
    }
    const auto* const label = std::ranges::find_if(
        kLabels, [&](const auto& known) { return word.starts_with(known.first); });
    if (label == std::end(kLabels))
      answer.reply.append(answer.reply.empty() ? "" : " ").append(word);
    else
      answer.stands_for.emplace_back(label->second, word.substr(label->first.size()));
  }
  return answer;
}

/// The config fields of a list such as `page,overlap`; nothing where one of the names is no field.
std::optional<ConfigFields> fields_of(std::string_view list) {
  ConfigFields fields;
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    const std::optional<std::string_view> field = config_field_from(list.substr(0, comma));
    if (!field) return std::nullopt;
    fields.add(*field);
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return fields;
}

class ExecSubject final : public Subject {
 public:
  explicit ExecSubject(const ChildOptions& options)
      : command_(options.command),
        name_(fmt::format("child `{}`", options.command)),
        timeout_(std::min(options.timeout, kTimeoutMax)),
        children_(options.children) {}
  ~ExecSubject() override;

  Result<void> start(const ChildOptions& options);
  Result<Reply> apply(const Operation& operation) override;
  Findings take_findings() override { return std::exchange(findings_, {}); }
  const ChildGreeting& said() const { return said_; }

 private:
  Result<std::string> ask(std::string question);
  Result<void> understand(std::string_view answer);
  Result<Reply> read(const Operation& operation, const Answer& answer);
  Reply without_labels(const Reply& reply);
  Result<void> compare_labels(const Operation& operation, const Answer& answer, const Reply& reply);
  tl::unexpected<Error> give_up(FindingKind kind, std::string text);
  tl::unexpected<Error> fail_for_good(FindingKind kind, std::string text);
  tl::unexpected<Error> raised_behind(std::string_view verb, std::string_view text) {
    return fail_for_good(FindingKind::subject_died,
                         fmt::format("raised after `{}`: {}", verb, printable(text, 300)));
  }
  tl::unexpected<Error> cannot_start(std::string_view why) const {
    return fail(fmt::format("{} cannot start: {}", name_, why), kExitEnvironment);
  }

  std::string command_;
  std::string name_;
  milliseconds timeout_;
  std::shared_ptr<Children> children_;
  std::unique_ptr<ChildProcess> process_;
  ChildGreeting said_;
  bool labels_ = false;
  bool again_ = false;            // the child said again=1: it can be greeted again
  bool answers_ = true;           // false once the process cannot be talked to any more
  Findings findings_;             // reported by the child about itself
  std::optional<Error> failure_;  // the finding that ended the process
};

ExecSubject::~ExecSubject() {
  if (again_ && answers_ && children_ != nullptr)
    children_->give_back(command_, std::move(process_));
}

/// Ends the process with a finding; every later operation returns that finding.
tl::unexpected<Error> ExecSubject::give_up(FindingKind kind, std::string text) {
  process_->stop(milliseconds::zero());
  answers_ = false;
  return fail_for_good(kind, std::move(text));
}

tl::unexpected<Error> ExecSubject::fail_for_good(FindingKind kind, std::string text) {
  failure_ = fail_as(kind, fmt::format("{} {}", name_, text)).value();
  return tl::unexpected(*failure_);
}

/// Sends a line and returns the line that answers it.
Result<std::string> ExecSubject::ask(std::string question) {
  const std::string what = printable(question);
  if (const std::string_view unasked = process_->output(); !unasked.empty())
    return give_up(
        FindingKind::subject_garbled,
        fmt::format("wrote `{}` unasked, before `{}` was sent to it", printable(unasked), what));
  question += '\n';
  const std::string time = time_text(std::chrono::nanoseconds(timeout_).count());
  switch (process_->exchange(question, timeout_)) {
    case Exchange::answered: return process_->take_answer();
    case Exchange::ended:
      return give_up(FindingKind::subject_died,
                     fmt::format("died before it answered `{}` ({})", what, process_->obituary()));
    case Exchange::unread:
      return give_up(FindingKind::subject_silent,
                     fmt::format("did not read all of `{}` within {}", what, time));
    case Exchange::silent:
      return give_up(FindingKind::subject_silent,
                     fmt::format("did not answer `{}` within {}{}", what, time,
                                 what.starts_with("hello") ? "; --timeout gives it longer" : ""));
    case Exchange::unfinished:
      return give_up(
          FindingKind::subject_silent,
          fmt::format("began its answer to `{}` with `{}` and did not end the line within {}", what,
                      printable(process_->output()), time));
    case Exchange::endless:
      return give_up(FindingKind::subject_garbled,
                     fmt::format("answered `{}` with a line of more than {} bytes", what,
                                 ChildProcess::kAnswerSizeMax));
    case Exchange::repeated: break;
  }
  return give_up(FindingKind::subject_garbled,
                 fmt::format("answered `{}` with more than one line: `{}`", what,
                             printable(process_->output())));
}

Result<void> ExecSubject::start(const ChildOptions& options) {
  Result<std::string> hello = greeting(options.config);
  if (!hello) return tl::unexpected(hello.error());
  if (children_ != nullptr) process_ = children_->take(command_);
  const bool is_fresh = process_ == nullptr;
  if (is_fresh) {
    process_ = std::make_unique<ChildProcess>();
    if (const int error = process_->start({.words = {"/bin/sh", "-c", shell_command(command_)}});
        error != 0)
      return cannot_start(std::strerror(error));
  }
  const Result<std::string> answer = ask(std::move(*hello));
  if (!answer && is_fresh && answer.error().finding != FindingKind::subject_garbled)
    return fail(answer.error().text, kExitEnvironment);
  if (!answer) return tl::unexpected(answer.error());
  if (const Answer said = split(*answer); said.raised) return raised_behind("hello", *said.raised);
  return understand(*answer);
}

/// Reads the child's answer to `hello`: the levels, capabilities and fields that it announces.
Result<void> ExecSubject::understand(std::string_view answer) {
  const Result<Line> line = parse_line(answer, false);
  if (!line)
    return give_up(FindingKind::subject_garbled, fmt::format("answered hello with `{}`: {}",
                                                             printable(answer), line.error().text));
  bool is_known = line->find("protocol").value_or("1") == "1";
  for (const auto& [key, value] : line->fields)
    is_known &= key.starts_with("x_") || std::ranges::find(kGreeting, key) != std::end(kGreeting);
  const std::string_view levels = line->find("levels").value_or("");
  const auto known = capabilities_of_words("levels", levels);
  const auto taken = capabilities_of_words("takes", line->find("takes").value_or(""));
  is_known &= known && taken && levels.substr(0, levels.find(',')) == "request";
  const auto flag = [&](std::string_view key, bool& value) {
    const std::string_view text = line->find(key).value_or("0");
    is_known &= text == "0" || text == "1";
    value = text == "1";
  };
  flag("labels", labels_);
  flag("again", again_);
  const std::optional<std::string_view> honours = line->find("honours");
  if (honours) {
    said_.honoured = fields_of(*honours);
    is_known &= said_.honoured.has_value();
  }
  const auto promise = [&](std::string_view key, std::int64_t& tokens) {
    const std::optional<std::string_view> text = line->find(key);
    if (!text) return;
    const char* const end = text->data() + text->size();
    const auto [last, error] = std::from_chars(text->data(), end, tokens);
    is_known &= error == std::errc() && last == end && tokens > 0;
  };
  promise("rehits", said_.promises.rehits);
  promise("chunks", said_.promises.chunks);
  promise("locks", said_.promises.locks);
  again_ &= is_known;
  if (!is_known)
    return cannot_start(fmt::format(
        "it answered hello with `{}`; expected is levels=request (or levels=request,tree,sequence, "
        "the levels that it has), then labels=1, again=1, "
        "takes=external,keys,server,tiers,disaggregation, honours= "
        "with config fields and rehits=, chunks= and locks= with a number of tokens above 0, each "
        "if it applies "
        "(cache_sim/check/protocol.md)",
        printable(answer)));
  said_.capabilities = *known | *taken;
  return {};
}

Result<Reply> ExecSubject::apply(const Operation& operation) {
  if (failure_) return tl::unexpected(*failure_);
  const Capability needed = capability_of(operation.verb);
  if (needed != Capability::slots && !said_.capabilities.contains(needed))
    return fail(fmt::format("{}: {} {}", to_string(operation.verb), name_, lack_of(needed)));
  const Result<std::string> text = ask(operation.text());
  if (!text) return tl::unexpected(text.error());
  if (*text == to_string(Refusal::unsupported)) return Reply::refusal(Refusal::unsupported);
  const Answer answer = split(*text);
  if (answer.raised) return raised_behind(to_string(operation.verb), *answer.raised);
  Result<Reply> reply = read(operation, answer);
  if (reply || failure_) return reply;
  return give_up(FindingKind::subject_garbled,
                 fmt::format("answered `{}` with `{}`: {}", printable(operation.text()),
                             printable(*text), reply.error().text));
}

/// Turns an answer into a reply and the findings that the child reports about itself. The error is
/// an answer that cannot be understood.
Result<Reply> ExecSubject::read(const Operation& operation, const Answer& answer) {
  const bool has_labels = operation.verb == Verb::admit || operation.verb == Verb::match;
  Result<Reply> reply =
      parse_reply(answer.reply, operation.verb,
                  std::span(kOfItself).first(has_labels ? std::size(kOfItself) : kOfAnyAnswer));
  if (answer.violation) {
    findings_.push_back({FindingKind::broken_invariant,
                         fmt::format("{} says after `{}`: {}", name_, to_string(operation.verb),
                                     printable(*answer.violation, 300)),
                         "no broken rule", printable(*answer.violation, 300)});
    if (!reply) return Reply();  // the child reported a finding, which ends the run
  }
  if (answer.wrong) {
    findings_.push_back({FindingKind::output_differs,
                         fmt::format("{} says after `{}`: {}", name_, to_string(operation.verb),
                                     printable(*answer.wrong, 300)),
                         "the output of an empty cache", printable(*answer.wrong, 300)});
    if (!reply) return Reply();
  }
  if (!reply) return reply;
  if (const std::int64_t broken = reply->get(ReplyField::violations);
      broken > 0 && !answer.violation)
    findings_.push_back(
        {FindingKind::broken_invariant,
         fmt::format("{} counts {} of its own", name_, counted(broken, "broken rule")),
         "violations=0", fmt::format("violations={}", broken)});
  if (Result<void> compared = compare_labels(operation, answer, *reply); !compared)
    return tl::unexpected(compared.error());
  // The run counts violations itself.
  if (operation.verb == Verb::check) return without(*reply, {ReplyField::violations});
  // `state` is a label in the answer to `admit` alone: `match` answers it with a length, `evict`
  // with a count.
  if (operation.verb != Verb::admit || reply->refused != Refusal::none) return reply;
  if (!labels_) return without_labels(*reply);
  if (!reply->has(ReplyField::state) || !reply->has(ReplyField::conv))
    return fail("it announced labels=1, so an answer to admit carries state= and conv=");
  return reply;
}

/// Drops the label fields of a child that has not announced labels, and adds a remark that they are
/// not looked at.
Reply ExecSubject::without_labels(const Reply& reply) {
  if (children_ != nullptr && (reply.has(ReplyField::state) || reply.has(ReplyField::conv)))
    children_->remark(
        name_ +
        " answers admit with state= or conv=, and neither is compared: its answer to hello has no "
        "labels=1");
  return without(reply, {ReplyField::state, ReplyField::conv});
}

/// Compares the tokens for which a handed-out state stands with the tokens of the prompt, so that
/// two states of the same length cannot be swapped unseen.
Result<void> ExecSubject::compare_labels(const Operation& operation, const Answer& answer,
                                         const Reply& reply) {
  for (const auto& [field, text] : answer.stands_for) {
    if (operation.verb != Verb::admit && operation.verb != Verb::match)
      return fail(fmt::format("{}_tokens= stands in answers to admit and match", to_string(field)));
    const Result<Tokens> tokens = parse_tokens(text);
    if (!tokens) return fail(fmt::format("{}_tokens: {}", to_string(field), tokens.error().text));
    const std::int64_t length = reply.get(field, tokens->size());
    const std::uint32_t common =
        tokens->common(0, operation.tokens, 0, std::min(tokens->size(), operation.tokens.size()));
    if (tokens->size() == common && length == common) continue;
    const auto told = [](const Tokens& some) {
      return some.empty() ? std::string("no tokens") : some.text(60);
    };
    std::string why;  // empty where the label says it: no tokens
    if (common < tokens->size())
      why = fmt::format(", and the prompt begins with only {} of these", common);
    else if (common > 0)
      why = fmt::format(", which is {}", counted(common, "token"));
    const auto most = static_cast<std::int64_t>(operation.tokens.size());
    findings_.push_back(
        {FindingKind::wrong_state_prefix,
         fmt::format("{} hands out {} of {} that stands for {}{}", name_,
                     field == ReplyField::cached ? "KV"
                     : field == ReplyField::conv ? "a conv state"
                                                 : "a state",
                     counted(length, "token"), told(*tokens), why),
         told(operation.tokens.prefix(static_cast<std::uint32_t>(std::min(length, most)))),
         told(*tokens)});
  }
  if (!answer.salt) return {};
  if (operation.verb != Verb::admit && operation.verb != Verb::match)
    return fail("salt= stands in answers to admit and match");
  const std::string salt = operation.salt.exists() ? operation.salt.text() : "";
  const bool has_hit =
      reply.get(operation.verb == Verb::admit ? ReplyField::cached : ReplyField::kv) > 0;
  if (has_hit && *answer.salt != salt)
    findings_.push_back({FindingKind::wrong_state_prefix,
                         fmt::format("{} hands out what was computed under the salt `{}`, and the "
                                     "request has `{}`",
                                     name_, printable(*answer.salt), salt),
                         "salt=" + salt, "salt=" + printable(*answer.salt)});
  return {};
}

}  // namespace

Result<std::unique_ptr<Subject>> start_child(const ChildOptions& options) {
  require(options.timeout > milliseconds::zero(), "a child has time to answer");
  auto child = std::make_unique<ExecSubject>(options);
  return child->start(options).map([&]() -> std::unique_ptr<Subject> { return std::move(child); });
}

const ChildGreeting& said_by(const Subject& child) {
  const auto* const started = dynamic_cast<const ExecSubject*>(&child);
  require(started != nullptr, "the subject is a child");
  return started->said();
}

std::span<const std::string_view> greeting_fields() {
  return kGreeting;
}

std::span<const std::string_view> child_fields() {
  return kOfItself;
}

}  // namespace lockstep::cache_sim

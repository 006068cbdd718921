#include "cache_sim/check/exec_subject.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "reference/base/child_process.hpp"
#include "reference/base/printable.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kTimeoutMax = std::chrono::hours(24 * 365);  // keeps the deadline in range

Result<std::string> greeting(const Config& config) {
  std::string line = "hello protocol=1";
  for (const auto& [name, value] : config.fields()) {
    if (std::any_of(value.begin(), value.end(),
                    [](unsigned char c) { return c <= ' ' || c == 0x7F; }))
      return fail(fmt::format("config field {}: `{}` holds a blank, and no child can read that",
                              name, printable(value)));
    line.append(" ").append(name).append("=").append(value);
  }
  return line;
}

/// A reply to an admit without the labels' lengths, which this child does not vouch for.
Reply without_labels(const Reply& reply) {
  Reply rest = Reply::refusal(reply.refused);
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
    const auto field = static_cast<ReplyField>(i);
    if (reply.has(field) && field != ReplyField::state && field != ReplyField::conv)
      rest.set(field, reply.get(field));
  }
  return rest;
}

class ExecSubject final : public Subject {
 public:
  explicit ExecSubject(const ChildOptions& options)
      : name_(fmt::format("child `{}`", options.command)),
        timeout_(std::min(options.timeout, kTimeoutMax)) {}

  Result<void> start(const ChildOptions& options);
  Result<Reply> apply(const Operation& operation) override;
  bool has_tree_verbs() const override { return tree_verbs_; }

 private:
  Result<std::string> ask(std::string question);
  tl::unexpected<Error> give_up(FindingKind kind, std::string text);
  tl::unexpected<Error> cannot_start(std::string_view why) const {
    return fail(fmt::format("{} cannot start: {}", name_, why), kExitEnvironment);
  }

  std::string name_;
  milliseconds timeout_;
  ChildProcess process_;
  bool tree_verbs_ = false;
  bool labels_ = false;
  std::optional<Error> failure_;  // the finding that ended the child
};

tl::unexpected<Error> ExecSubject::give_up(FindingKind kind, std::string text) {
  process_.stop(milliseconds::zero());
  failure_ = fail_as(kind, fmt::format("{} {}", name_, text)).value();
  return tl::unexpected(*failure_);
}

/// Sends a line and returns the line that answers it.
Result<std::string> ExecSubject::ask(std::string question) {
  const std::string what = printable(question);
  if (const std::string_view unasked = process_.output(); !unasked.empty())
    return give_up(
        FindingKind::subject_garbled,
        fmt::format("wrote `{}` unasked, before `{}` was sent to it", printable(unasked), what));
  question += '\n';
  const std::string time = time_text(std::chrono::nanoseconds(timeout_).count());
  switch (process_.exchange(question, timeout_)) {
    case Exchange::answered: return process_.take_answer();
    case Exchange::ended:
      return give_up(FindingKind::subject_died,
                     fmt::format("died before it answered `{}` ({})", what, process_.obituary()));
    case Exchange::unread:
      return give_up(FindingKind::subject_silent,
                     fmt::format("did not read all of `{}` within {}", what, time));
    case Exchange::silent:
      return give_up(FindingKind::subject_silent,
                     fmt::format("did not answer `{}` within {}", what, time));
    case Exchange::unfinished:
      return give_up(
          FindingKind::subject_silent,
          fmt::format("began its answer to `{}` with `{}` and did not end the line within {}", what,
                      printable(process_.output()), time));
    case Exchange::endless:
      return give_up(FindingKind::subject_garbled,
                     fmt::format("answered `{}` with a line of more than {} bytes", what,
                                 ChildProcess::kAnswerSizeMax));
    case Exchange::repeated: break;
  }
  return give_up(FindingKind::subject_garbled,
                 fmt::format("answered `{}` with more than one line: `{}`", what,
                             printable(process_.output())));
}

Result<void> ExecSubject::start(const ChildOptions& options) {
  Result<std::string> hello = greeting(options.config);
  if (!hello) return tl::unexpected(hello.error());
  if (const int error = process_.start({.words = {"/bin/sh", "-c", options.command}}); error != 0)
    return cannot_start(std::strerror(error));
  const Result<std::string> answer = ask(std::move(*hello));
  if (!answer && answer.error().finding == FindingKind::subject_died)
    return fail(answer.error().text, kExitEnvironment);
  if (!answer) return tl::unexpected(answer.error());

  const std::string with_verb = "hello " + *answer;  // the answer has no verb; parse_line wants one
  const Result<Line> line = parse_line(with_verb);
  if (!line)
    return give_up(
        FindingKind::subject_garbled,
        fmt::format("answered hello with `{}`: {}", printable(*answer), line.error().text));
  const std::string_view levels = line->find("levels").value_or("");
  const std::string_view labels = line->find("labels").value_or("0");
  if (line->find("protocol").value_or("1") != "1" ||
      (levels != "request" && levels != "request,tree") || (labels != "0" && labels != "1"))
    return cannot_start(
        fmt::format("it answered hello with `{}` and not with levels=request or "
                    "levels=request,tree, and labels=1 if it has them",
                    printable(*answer)));
  tree_verbs_ = levels == "request,tree";
  labels_ = labels == "1";
  return {};
}

Result<Reply> ExecSubject::apply(const Operation& operation) {
  if (failure_) return tl::unexpected(*failure_);
  if (is_tree_verb(operation.verb) && !tree_verbs_)
    return fail(
        fmt::format("{}: {} understands request verbs only", to_string(operation.verb), name_));
  const Result<std::string> answer = ask(operation.text());
  if (!answer) return tl::unexpected(answer.error());
  const auto garbled = [&](std::string_view why) {
    return give_up(FindingKind::subject_garbled,
                   fmt::format("answered `{}` with `{}`: {}", printable(operation.text()),
                               printable(*answer), why));
  };
  Result<Reply> reply = parse_reply(*answer, operation.verb);
  if (!reply) return garbled(reply.error().text);
  // Elsewhere `state` is no label: match offers a length by it, evict counts by it.
  if (operation.verb != Verb::admit || reply->refused != Refusal::none) return reply;
  if (!labels_) return without_labels(*reply);
  if (!reply->has(ReplyField::state) || !reply->has(ReplyField::conv))
    return garbled("it announced labels=1, so an answer to admit carries state= and conv=");
  return reply;
}

}  // namespace

Result<std::unique_ptr<Subject>> start_child(const ChildOptions& options) {
  require(options.timeout > milliseconds::zero(), "a child has time to answer");
  auto child = std::make_unique<ExecSubject>(options);
  return child->start(options).map([&]() -> std::unique_ptr<Subject> { return std::move(child); });
}

}  // namespace lockstep::cache_sim

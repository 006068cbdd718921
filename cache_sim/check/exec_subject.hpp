// The subject `exec:COMMAND`: a child process, so that a real server (SGLang, vLLM, yours) answers
// the operations that an oracle and a policy answer. The protocol is a line out and a line back
// (cache_sim/check/protocol.md):
//
//   hello protocol=1 block=256 … track_interval=256    levels=request again=1
//   admit id=r1 tokens=a1000                           cached=0
//   extend id=r1 n=1000                                n=1000
//   finish id=r1                                       ok
//
// fixtures/subjects/minimal_cache.py is such a child in one page.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cache_sim/check/children.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

struct ChildOptions {
  std::string command;                        ///< for /bin/sh
  Config config;                              ///< what the child is greeted with
  std::chrono::milliseconds timeout{10'000};  ///< for each answer, from the first byte sent
  std::shared_ptr<Children> children{};       ///< may be null: the child plays once
};

/// Starts the child in a process group of its own and greets it; where `children` has one of this
/// command that can be greeted again, greets that one. What can go wrong, here and later:
///   the environment   it dies before its first answer to hello, or that answer offers nothing we
///                     speak
///   a finding         silence, garbage, and death after the greeting
///   bad input         a tree verb for a child that understands request verbs only
/// A finding ends the child, and every later operation returns it again. The child's standard error
/// is kept apart from ours; where the child dies, its last line is quoted.
///
/// Destroying the subject gives a child that can be greeted again to `children`. Any other one has
/// its standard input closed and a moment to end by itself; then SIGTERM and SIGKILL end its
/// process group.
Result<std::unique_ptr<Subject>> start_child(const ChildOptions& options);

/// What a child says of itself in its answer to hello.
struct ChildGreeting {
  Capabilities capabilities;             ///< `levels=` and `takes=`
  std::optional<ConfigFields> honoured;  ///< `honours=`: config fields that it obeys
  std::int64_t rehits = 0;               ///< `rehits=`: what a later prompt finds again
};
/// Of a subject that start_child() has made.
const ChildGreeting& said_by(const Subject& child);

/// The fields of an answer to hello, and (with their `=`) those that any other answer can have
/// beside the reply's own.
std::span<const std::string_view> greeting_fields();
std::span<const std::string_view> child_fields();

}  // namespace lockstep::cache_sim

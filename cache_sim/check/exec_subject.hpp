// The subject `exec:COMMAND`: a child process, so that a real server answers the same operations as
// an oracle and a policy. The protocol is one line out and one line back
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
#include "cache_sim/check/closed_subject.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

struct ChildOptions {
  std::string command;                        ///< given to /bin/sh
  Config config;                              ///< the fields of `hello`
  std::chrono::milliseconds timeout{10'000};  ///< for each answer, from the first byte sent
  std::shared_ptr<Children> children{};  ///< may be null: then the process ends with the subject
};

/// Starts the child in a process group of its own and greets it. Where `children` has a process of
/// this command that can be greeted again, that one is greeted instead. Failures, here and later:
///   the environment   the process dies before its first answer to hello, or gives none in time (a
///                     busy machine may not have started it), or the answer announces nothing that
///                     Lockstep speaks
///   a finding         an answer that cannot be understood; silence and death after the greeting
///   bad input         a tree verb for a child that understands request verbs only
/// A finding ends the child, and every later operation returns the same finding. The child's
/// standard error is kept apart from Lockstep's; where the child dies, its last line is quoted.
///
/// The destructor gives a child that can be greeted again to `children`. It closes the standard
/// input of any other child and waits a moment for it to end by itself; then it sends SIGTERM and
/// SIGKILL to the process group.
Result<std::unique_ptr<Subject>> start_child(const ChildOptions& options);

/// The announcements of a child in its answer to hello.
struct ChildGreeting {
  Capabilities capabilities;             ///< `levels=` and `takes=`
  std::optional<ConfigFields> honoured;  ///< `honours=`: config fields that it obeys
  Promises promises;                     ///< `rehits=`, `chunks=` and `locks=`
};
/// The greeting of a subject that start_child() has made.
const ChildGreeting& said_by(const Subject& child);

/// The names of all fields in an answer to hello, and of the fields (written with their `=`) that
/// any other answer can have beside the fields of the reply.
std::span<const std::string_view> greeting_fields();
std::span<const std::string_view> child_fields();

}  // namespace lockstep::cache_sim

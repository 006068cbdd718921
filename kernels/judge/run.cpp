#include "kernels/judge/run.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "kernels/judge/memory.hpp"
#include "reference/base/parallel.hpp"
#include "reference/base/philox.hpp"
#include "reference/base/printable.hpp"

namespace lockstep::judging {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int kPings = 21;

std::int64_t bytes_of(const Case& c) {
  std::int64_t bytes = 0;
  for (const Tensor& tensor : c.tensors) bytes += tensor.allocation_bytes();
  return bytes;
}

Json case_json(const JudgedKernel& operation, const Case& c) {
  Json json{{"name", c.name},
            {"guard", kGuardBytes},
            {"positional", operation.positional},
            {"returns", operation.returns},
            {"bytes", bytes_of(c)},
            {"scalars", Json::object()},
            {"tensors", Json::array()}};
  std::int64_t offset = 0;
  for (const Tensor& t : c.tensors) {
    json["tensors"].push_back({{"name", t.name},
                               {"dtype", name_of(t.type)},
                               {"type", static_cast<int>(t.type)},
                               {"role", t.role == Role::input    ? "input"
                                        : t.role == Role::output ? "output"
                                                                 : "state"},
                               {"extents", t.extents},
                               {"strides", t.strides},
                               {"far", t.far},
                               {"offset", offset},
                               {"bytes", t.allocation_bytes()}});
    offset += t.allocation_bytes();
  }
  for (const Scalar& scalar : c.scalars)
    json["scalars"][scalar.name] =
        std::visit([](const auto& value) { return Json(value); }, scalar.value);
  return json;
}

/// A field of an answer, or `otherwise` if it is missing or of another type: a candidate's process
/// may answer anything.
template <class T>
T field(const Json& answer, const char* name, T otherwise) {
  try {
    return answer.value(name, std::move(otherwise));
  } catch (const Json::exception&) {
    return T{};
  }
}

/// The candidate's message as one line, without control characters.
std::string message_in(const Json& answer) {
  std::string text = field<std::string>(answer, "message", "");
  for (char& c : text)
    if ((c >= 0 && c < ' ') || c == '\x7f') c = ' ';
  return text.size() > 600 ? printable(text, 600) : text;
}

Outcome outcome_in(const Json& answer) {
  const std::string word = field<std::string>(answer, "outcome", "");
  if (word == "done") return Outcome::done;
  if (word == "unsupported") return Outcome::unsupported;
  return word == "raised" ? Outcome::raised : Outcome::garbled;
}

}  // namespace

bool is_library(const std::string& candidate) {
  const std::string module = candidate.substr(0, candidate.find_last_of(':'));
  const std::string name = std::filesystem::path(module).filename().string();
  return name.ends_with(".so") || name.find(".so.") != std::string::npos;
}

std::optional<FindingKind> kind_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::raised:
    case Outcome::died: return FindingKind::subject_died;
    case Outcome::silent: return FindingKind::subject_silent;
    case Outcome::garbled: return FindingKind::subject_garbled;
    case Outcome::done:
    case Outcome::unsupported:
    case Outcome::not_run: break;
  }
  return std::nullopt;
}

// --- Starting ------------------------------------------------------------------------------------

Result<std::unique_ptr<CandidateProcess>> CandidateProcess::start(const JudgedKernel& operation,
                                                                  const JudgeRequest& request,
                                                                  bool with_copy_rate) {
  auto shared = SharedMemory::make(), script = SharedMemory::make();
  if (!shared) return tl::unexpected(shared.error());
  if (!script) return tl::unexpected(script.error());
  std::unique_ptr<CandidateProcess> made(
      new CandidateProcess(operation, request, std::move(*shared), std::move(*script)));
  if (auto begun = made->begin(with_copy_rate); !begun) return tl::unexpected(begun.error());
  return made;
}

Result<Json> CandidateProcess::launch(bool with_copy_rate) {
  ChildCommand command;
  const char* const given = std::getenv("LOCKSTEP_PYTHON");
  const std::string python = given != nullptr ? given : "python3";
  const bool library = is_library(request_.candidate);
  if (library)
    command.body = [this] {
      return run_library(std::string(operation_.name), request_, shared_.fd());
    };
  else
    command.words = {python, fmt::format("/dev/fd/{}", script_.fd()), std::to_string(shared_.fd()),
                     request_.device, request_.candidate};
  process_.reset();
  Subreaper::end_children();  // so that the next process has the device to itself
  if (const int error = process_.emplace().start(command); error != 0)
    return fail(
        fmt::format("{} cannot be started: {}", library ? "a child" : python, std::strerror(error)),
        kExitEnvironment);
  return ask_first("machine", {{"copy_rate", with_copy_rate}});
}

Result<void> CandidateProcess::begin(bool with_copy_rate) {
  left_ = std::chrono::seconds(std::min<std::int64_t>(request_.timeout_s, 1'000'000));
  const auto size = static_cast<std::int64_t>(std::strlen(kChildScript));
  if (auto room = script_.reserve(size); !room) return room;
  script_.write(0, kChildScript, size);
  const auto machine = launch(with_copy_rate);
  if (!machine) return tl::unexpected(machine.error());
  machine_ = {.device = field<std::string>(*machine, "device", ""),
              .copy_gbps = field(*machine, "copy_gbps", 0.0),
              .on_gpu = field(*machine, "gpu", false),
              .cold_bytes = field(*machine, "cold_bytes", std::int64_t{0})};
  if (!machine_.on_gpu) {  // the judge measures the host's rate itself
    const std::unique_ptr<Place> host = host_place();
    machine_.cold_bytes = host->cold_bytes();
    if (with_copy_rate) machine_.copy_gbps = host->copy_gbps();
  }
  machine_.most_gbps = machine_.copy_gbps;
  if (!machine_.on_gpu && with_copy_rate) machine_.most_gbps = host_most_gbps();
  std::vector<double> pings;
  for (int i = 0; with_copy_rate && i < kPings; ++i) {
    if (const auto answer = ask_first("ping"); !answer) return tl::unexpected(answer.error());
    pings.push_back(asked_for_.count());
  }
  if (!pings.empty()) ping_s_ = median(pings);
  if (const auto loaded = ask_first("load"); !loaded) return tl::unexpected(loaded.error());
  return {};
}

/// Starts another process after a case has ended the last one.
void CandidateProcess::restart() {
  outcome_ = Outcome::done;
  if (!launch(false) || !ask_first("load")) outcome_ = Outcome::not_run;
}

Result<Json> CandidateProcess::ask_first(const std::string& what, Json request) {
  const std::optional<Json> answer = ask(what, std::move(request));
  if (!answer)
    return fail(request_.candidate + ": " + message_ + ", before the first case", kExitEnvironment);
  if (answer->contains("refused"))
    return fail(field<std::string>(*answer, "refused", ""),
                field(*answer, "status", 0) == kExitBadInput ? kExitBadInput : kExitEnvironment);
  return *answer;
}

std::optional<Json> CandidateProcess::ask(const std::string& what, Json request) {
  if (outcome_ != Outcome::done) return std::nullopt;
  const auto ended_with = [&](Outcome outcome, std::string message) {
    outcome_ = outcome;
    message_ = std::move(message);
    process_->stop(std::chrono::milliseconds(0));
    return std::nullopt;
  };
  const auto garbled = [&](std::string_view said) {
    return ended_with(Outcome::garbled,
                      fmt::format("somebody else answers for the process: `{}`", printable(said)));
  };
  request["do"] = what;
  request["n"] = ++number_;
  if (const std::string_view early = process_->output(); !early.empty()) return garbled(early);
  const auto begin = Clock::now();
  const Exchange how = process_->exchange(request.dump() + "\n", left_);
  asked_for_ = Clock::now() - begin;
  left_ -= std::min(left_, std::chrono::duration_cast<std::chrono::milliseconds>(asked_for_));
  switch (how) {
    case Exchange::answered: break;
    case Exchange::ended: return ended_with(Outcome::died, "it ended: " + process_->obituary());
    case Exchange::unread:
    case Exchange::silent:
    case Exchange::unfinished:
      return ended_with(Outcome::silent, fmt::format("no answer within {} s", request_.timeout_s));
    case Exchange::endless:
    case Exchange::repeated: return garbled(process_->output());
  }
  const std::string line = process_->take_answer();
  Json answer = Json::parse(line, nullptr, false);
  if (!answer.is_object() || field(answer, "n", std::int64_t{0}) != number_) return garbled(line);
  if (field(answer, "broken", false)) {
    outcome_ = Outcome::raised;
    message_ = "the GPU cannot be used after the error of an earlier case";
  }
  return answer;
}

// --- Untimed runs --------------------------------------------------------------------------------

bool CandidateProcess::write_inputs(const Case& c, Fill fill, std::int64_t offset) const {
  struct Part {
    const Tensor& tensor;
    std::int64_t offset;
    bool written = false;
  };
  std::vector<Part> parts;
  for (const Tensor& tensor : c.tensors) {
    parts.push_back({tensor, offset});
    offset += tensor.allocation_bytes();
  }
  in_parallel(parts, [&](Part& part) {
    const Bytes bytes = allocation_of(part.tensor, fill);
    part.written =
        shared_.write(part.offset, bytes.data(), static_cast<std::int64_t>(bytes.size()));
  });
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.written; });
}

Result<void> CandidateProcess::announce(const Case& c, std::int64_t room) {
  if (auto reserved = shared_.reserve(room); !reserved) return reserved;
  ask("case", case_json(operation_, c));
  return {};
}

NamedStages CandidateProcess::read_stages(const Json& sizes, std::int64_t offset) const {
  NamedStages stages;
  struct stat file {};
  if (!sizes.is_object() || ::fstat(shared_.fd(), &file) != 0) return stages;
  for (const auto& [name, size] : sizes.items()) {
    if (!size.is_number_unsigned()) return stages;
    const auto bytes = size.get<std::uint64_t>();
    if (bytes > static_cast<std::uint64_t>(file.st_size - offset)) return stages;
    std::vector<float> values(bytes / sizeof(float));
    const auto whole = static_cast<std::int64_t>(values.size() * sizeof(float));
    if (!shared_.read(offset, reinterpret_cast<char*>(values.data()), whole)) return stages;
    offset += whole;
    stages[name].values.assign(values.begin(), values.end());
  }
  return stages;
}

/// `runs` with the outcome and message of the process's end.
template <class Runs>
Runs CandidateProcess::failed(Runs runs) const {
  runs.outcome = outcome_;
  runs.message = message_;
  return runs;
}

Result<CaseRuns> CandidateProcess::run(const Case& c, std::size_t count) {
  CaseRuns runs;
  if (outcome_ == Outcome::died || outcome_ == Outcome::raised) restart();
  if (outcome_ != Outcome::done) {
    runs.message = "was not run any more";
    return runs;
  }
  const std::int64_t bytes = bytes_of(c);
  if (auto announced = announce(c, bytes); !announced) return tl::unexpected(announced.error());
  for (std::size_t i = 0; i < count; ++i) {
    write_inputs(c, kRunFills[i], 0);
    const std::optional<Json> answer = ask("run");
    if (!answer) return failed(std::move(runs));
    runs.run_s = asked_for_.count();
    runs.outcome = outcome_in(*answer);
    runs.message = message_in(*answer);
    if (runs.outcome != Outcome::done) return runs;
    Bytes& after = runs.runs.emplace_back(static_cast<std::size_t>(bytes));
    if (!shared_.read(0, after.data(), bytes)) {
      runs.outcome = Outcome::garbled;
      runs.message = "the shared memory is shorter than the results";
      return runs;
    }
    if (runs.strayed.empty()) runs.strayed = field<std::string>(*answer, "strayed", "");
    if (answer->contains("stages")) runs.stages = read_stages(answer->at("stages"), bytes);
  }
  return runs;
}

// --- Timed calls ---------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kFetchedBytes = std::int64_t{512} << 20;  // compared per round, at most
constexpr std::int64_t kSetBytes = std::int64_t{4} << 30;        // bytes of all sets, at most
constexpr int kRounds = 5;                                       // after a warm-up round
constexpr int kRoundsFew = 2;                                    // if kEnoughSeconds have passed
constexpr double kEnoughSeconds = 3;

/// The number of sets: enough to exceed all caches, and on a GPU at least 64, so that a round
/// outlasts the launch of its graph.
std::int64_t set_count(const Machine& machine, std::int64_t bytes, double run_s) {
  const std::int64_t cold = (machine.cold_bytes + bytes - 1) / bytes;
  std::int64_t most = std::max<std::int64_t>(2, kSetBytes / bytes);
  if (!machine.on_gpu) most = std::min<std::int64_t>(16, most);
  if (!machine.on_gpu && run_s > 0)
    most = std::min(most, std::max<std::int64_t>(2, static_cast<std::int64_t>(1 / run_s)));
  const std::int64_t wanted = machine.on_gpu ? std::max<std::int64_t>(cold, 64) : cold;
  return std::clamp<std::int64_t>(wanted, 2, most);
}

}  // namespace

bool CandidateProcess::round(int number, TimedRuns& timed, double& device_us) {
  if (!ask("place", {{"first", number}})) return false;
  const std::optional<Json> answer = ask("calls");
  if (!answer) return false;
  device_us = field(*answer, "device_us", 0.0);
  timed.outcome = outcome_in(*answer);
  timed.message = message_in(*answer);
  return timed.outcome == Outcome::done;
}

/// Fetches sets of the round (all of them if they are small) and compares them with the untimed
/// runs.
bool CandidateProcess::compare(int number, std::int64_t sets, std::uint64_t seed,
                               const TimedInput& one, const TimedInput& other, TimedRuns& timed) {
  const std::int64_t bytes = bytes_of(one.which);
  const std::int64_t wanted =
      std::min(sets, std::max<std::int64_t>(2, kFetchedBytes / std::max<std::int64_t>(1, bytes)));
  Bytes got(static_cast<std::size_t>(bytes));
  for (std::int64_t i = 0; i < wanted; ++i) {
    // One set of each stretch of sets, drawn after the calls, so that no candidate can foresee it.
    const std::int64_t begin = i * sets / wanted, end = (i + 1) * sets / wanted;
    const auto set =
        begin + static_cast<std::int64_t>(random_below(
                    static_cast<std::uint64_t>(end - begin), seed, 903,
                    static_cast<std::uint64_t>(number) * 64 + static_cast<std::uint64_t>(i)));
    const std::optional<Json> answer = ask("fetch", {{"index", set}});
    if (!answer || !shared_.read(2 * bytes, got.data(), bytes)) return false;
    ++timed.compared;
    const auto input = static_cast<int>((number + set) % 2);
    const Bytes& expected = (input == 0 ? one : other).runs.runs[kTimedRun];
    if (got == expected) continue;
    if (timed.wrong++ == 0) timed.wrong_input = input, timed.wrong_bytes = got;
  }
  return true;
}

Result<void> CandidateProcess::make_sets(std::int64_t count, const TimedInput& one,
                                         const TimedInput& other) {
  const std::int64_t bytes = bytes_of(one.which);
  if (auto announced = announce(one.which, 3 * bytes); !announced) return announced;
  write_inputs(one.which, kRunFills[kTimedRun], 0);
  write_inputs(other.which, kRunFills[kTimedRun], bytes);
  ask("sets", {{"count", count}});
  return {};
}

Result<TimedRuns> CandidateProcess::repeat(const TimedInput& one, const TimedInput& other,
                                           std::uint64_t seed) {
  constexpr std::int64_t kSets = 2;
  TimedRuns calls;
  if (auto made = make_sets(kSets, one, other); !made) return tl::unexpected(made.error());
  for (int number = 0; number < 2; ++number) {
    double device_us = 0;
    if (number == 1 && !ask("record")) return failed(std::move(calls));
    if (!round(number, calls, device_us))
      return outcome_ == Outcome::done ? calls : failed(std::move(calls));
  }
  if (!compare(1, kSets, seed, one, other, calls)) return failed(std::move(calls));
  ask("sets", {{"count", 0}});
  return calls;
}

Result<TimedRuns> CandidateProcess::time(const TimedInput& one, const TimedInput& other,
                                         std::uint64_t seed) {
  TimedRuns timed;
  const std::int64_t sets = set_count(machine_, bytes_of(one.which), one.runs.run_s);
  if (auto made = make_sets(sets, one, other); !made) return tl::unexpected(made.error());
  constexpr double kClock_us = 0.1;  // a round of calls that do nothing takes no longer than a ping
  std::vector<double> us;
  double device_least = 0,
         clock_least = 0;  // microseconds of the round that is fastest by the clock
  const auto begin = Clock::now();
  for (int number = 0; number <= kRounds; ++number) {
    if (number > kRoundsFew && Seconds(Clock::now() - begin).count() > kEnoughSeconds) break;
    if (number == 1) {
      const std::optional<Json> answer = ask("record");
      if (!answer) return failed(std::move(timed));
      timed.how = field<std::string>(*answer, "how", "");
    }
    double device_us = 0;
    if (!round(number, timed, device_us))
      return outcome_ == Outcome::done ? timed : failed(std::move(timed));
    const double clock_us = std::max(kClock_us, (asked_for_.count() - ping_s_) * 1e6);
    if (!compare(number, sets, seed, one, other, timed)) return failed(std::move(timed));
    if (number == 0) continue;  // the warm-up round does not count
    const double round_us = machine_.on_gpu ? device_us : clock_us;
    if (us.empty() || clock_us < clock_least) clock_least = clock_us, device_least = device_us;
    us.push_back(round_us / static_cast<double>(sets));
  }
  ask("sets", {{"count", 0}});
  timed.us = median(us);
  timed.how = fmt::format("median of {} rounds of {} calls, {}", us.size(), sets, timed.how);
  // The device's time comes from the candidate's process, so it must agree with the judge's clock.
  constexpr double kLaunch_us = 500;
  if (machine_.on_gpu && device_least + kLaunch_us < clock_least / 2) {
    timed.reported_us = timed.us;
    timed.us = clock_least / static_cast<double>(sets);
  }
  return timed;
}

}  // namespace lockstep::judging

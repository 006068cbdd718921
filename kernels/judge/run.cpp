#include "kernels/judge/run.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "reference/base/parallel.hpp"

namespace lockstep::judging {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

/// A folder of this run's own that goes with it.
class Folder {
 public:
  static Result<Folder> make() {
    std::string name = (fs::temp_directory_path() / "lockstep-judge-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      return fail(name + ": the folder cannot be made: " + std::strerror(errno), kExitEnvironment);
    return Folder(name);
  }
  Folder(Folder&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  Folder& operator=(Folder&&) = delete;
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  explicit Folder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Json scalar_json(const Scalar& scalar) {
  return std::visit([](const auto& value) { return Json(value); }, scalar.value);
}

Json case_json(const Case& c) {
  Json json{{"name", c.name}, {"timed", c.timed}, {"scalars", Json::object()}};
  json["tensors"] = Json::array();
  std::int64_t offset = 0;
  for (const Tensor& t : c.tensors) {
    json["tensors"].push_back({{"name", t.name},
                               {"dtype", name_of(t.type)},
                               {"role", t.role == Role::input    ? "input"
                                        : t.role == Role::output ? "output"
                                                                 : "state"},
                               {"extents", t.extents},
                               {"strides", t.strides},
                               {"offset", offset},
                               {"bytes", t.allocation_bytes()}});
    offset += t.allocation_bytes();
  }
  for (const Scalar& scalar : c.scalars) json["scalars"][scalar.name] = scalar_json(scalar);
  return json;
}

std::string fill_name(Fill fill) {
  return fill == Fill::poison ? "poison" : "finite";
}

Result<void> write_inputs(const Folder& folder, const JudgedKernel& operation,
                          const std::vector<Case>& cases, const JudgeRequest& request) {
  Json all{{"operation", operation.name}, {"candidate", request.candidate},
           {"device", request.device},    {"guard", kGuardBytes},
           {"timed", request.timed},      {"positional", operation.positional},
           {"returns", operation.returns}};
  for (const Fill fill : kRunFills) all["fills"].push_back(fill_name(fill));
  struct Input {
    std::size_t number;
    Fill fill;
    bool written = false;
  };
  std::vector<Input> inputs;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    all["cases"].push_back(case_json(cases[i]));
    for (const Fill fill : {Fill::poison, Fill::finite}) inputs.push_back({i, fill});
  }
  in_parallel(inputs, [&](Input& one) {
    std::ofstream file(folder.file(fmt::format("in_{}_{}.bin", one.number, fill_name(one.fill))),
                       std::ios::binary);
    for (const Tensor& tensor : cases[one.number].tensors) {
      const Bytes bytes = allocation_of(tensor, one.fill);
      file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    }
    file.close();
    one.written = !file.fail();
  });
  if (!std::all_of(inputs.begin(), inputs.end(), [](const Input& one) { return one.written; }))
    return fail(folder.path() + ": the cases cannot be written there (a full disk?)",
                kExitEnvironment);
  write_child_file(folder.file("run.json"), all.dump());
  return {};
}

/// The last lines that the child wrote, for a sentence.
std::string last_words(const Folder& folder) {
  std::string text = read_text(folder.file("log.txt"));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  const std::size_t line = text.find_last_of('\n');
  if (line != std::string::npos) text = text.substr(line + 1);
  return text.size() > 300 ? text.substr(0, 300) + " …" : text;
}

/// Waits for the child, and ends it behind the time limit; true: it had to be ended.
bool wait_for(pid_t child, std::int64_t timeout_s, int& status) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_s);
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

std::string ending(int status) {
  if (WIFSIGNALED(status))
    return fmt::format("it died of signal {} ({})", WTERMSIG(status),
                       ::strsignal(WTERMSIG(status)));
  return fmt::format("it ended with status {}", WEXITSTATUS(status));
}

NamedStages read_stages(const Folder& folder, std::size_t number) {
  const Json sizes =
      Json::parse(read_text(folder.file(fmt::format("stages_{}.json", number))), nullptr, false);
  NamedStages stages;
  if (!sizes.is_object()) return stages;
  const std::string bytes = read_text(folder.file(fmt::format("stages_{}.bin", number)));
  std::size_t at = 0;
  for (const auto& [name, size] : sizes.items()) {
    std::vector<float> values(size.get<std::size_t>() / sizeof(float));
    if (at + values.size() * sizeof(float) > bytes.size()) break;
    std::memcpy(values.data(), bytes.data() + at, values.size() * sizeof(float));
    at += values.size() * sizeof(float);
    stages[name].values.assign(values.begin(), values.end());
  }
  return stages;
}

Result<CandidateRuns> read_answers(const Folder& folder, const std::vector<Case>& cases,
                                   const std::string& ended, bool silent) {
  CandidateRuns all;
  if (const Json machine = Json::parse(read_text(folder.file("machine.json")), nullptr, false);
      machine.is_object()) {
    all.device = machine.value("device", "");
    all.copy_gbps = machine.value("copy_gbps", 0.0);
    all.on_gpu = machine.value("gpu", false);
  }
  bool alive = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    CaseRuns& one = all.cases.emplace_back();
    const Json done =
        Json::parse(read_text(folder.file(fmt::format("done_{}.json", i))), nullptr, false);
    if (!done.is_object()) {
      // The first case without an answer is the one that ended the child; the others never ran.
      one.outcome = silent ? Outcome::silent : Outcome::died;
      one.message = alive ? ended : "was not run any more";
      if (!alive) one.outcome = Outcome::unsupported;
      alive = false;
      continue;
    }
    const std::string status = done.value("status", "");
    one.outcome = status == "done"          ? Outcome::done
                  : status == "unsupported" ? Outcome::unsupported
                                            : Outcome::raised;
    one.message = done.value("message", "");
    one.time_us = done.value("time_us", 0.0);
    one.how = done.value("how", "");
    if (one.outcome != Outcome::done) continue;
    one.stages = read_stages(folder, i);
    std::size_t size = 0;
    for (const Tensor& tensor : cases[i].tensors)
      size += static_cast<std::size_t>(tensor.allocation_bytes());
    for (std::size_t run = 0; run < std::size(kRunFills); ++run) {
      const std::string text = read_text(folder.file(fmt::format("out_{}_{}.bin", i, run)));
      if (text.size() != size)
        return fail(fmt::format("{}: the answer of case {} has {} bytes for {}", folder.path(),
                                cases[i].name, text.size(), size),
                    kExitEnvironment);
      one.runs.emplace_back(text.begin(), text.end());
    }
  }
  return all;
}

/// Python with the script; returns only where that fails.
[[noreturn]] void become_python(const std::string& script, const std::string& folder) {
  const char* const given = std::getenv("LOCKSTEP_PYTHON");
  std::string python = given != nullptr ? given : "python3";
  std::string file = script, argument = folder;
  char* words[] = {python.data(), file.data(), argument.data(), nullptr};
  ::execvp(python.c_str(), words);
  write_child_file(folder + "/environment.json",
                   Json{{"text", python + " cannot be started: " + std::strerror(errno)},
                        {"status", kExitEnvironment}}
                       .dump());
  ::_exit(kExitEnvironment);
}

}  // namespace

void write_child_file(const std::string& path, const std::string& content) {
  std::ofstream(path + ".part", std::ios::binary) << content;
  std::error_code ignored;
  fs::rename(path + ".part", path, ignored);
}

bool is_library(const std::string& candidate) {
  const std::string module = candidate.substr(0, candidate.find_last_of(':'));
  const std::string name = fs::path(module).filename().string();
  return name.ends_with(".so") || name.find(".so.") != std::string::npos;
}

Result<CandidateRuns> run_candidate(const JudgedKernel& operation, const std::vector<Case>& cases,
                                    const JudgeRequest& request) {
  const Result<Folder> folder = Folder::make();
  if (!folder) return tl::unexpected(folder.error());
  if (auto written = write_inputs(*folder, operation, cases, request); !written)
    return tl::unexpected(written.error());
  const std::string script = folder->file("child.py");
  if (!is_library(request.candidate)) write_child_file(script, kChildScript);
  const int log = ::open(folder->file("log.txt").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  const pid_t child = ::fork();
  if (child < 0)
    return fail(std::string("a child cannot be started: ") + std::strerror(errno),
                kExitEnvironment);
  if (child == 0) {
    ::dup2(log, 1), ::dup2(log, 2);
    if (!is_library(request.candidate)) become_python(script, folder->path());
    ::_exit(run_library(operation, cases, request, folder->path()));
  }
  ::close(log);
  int status = 0;
  const bool silent = wait_for(child, request.timeout_s, status);
  const Json refused = Json::parse(read_text(folder->file("environment.json")), nullptr, false);
  if (refused.is_object())
    return fail(refused.value("text", ""),
                static_cast<ExitStatus>(refused.value("status", int{kExitEnvironment})));
  std::string ended =
      silent ? fmt::format("no answer within {} s", request.timeout_s) : ending(status);
  if (const std::string words = last_words(*folder); !words.empty()) ended += ": " + words;
  if (!fs::exists(folder->file("machine.json")))
    return fail(request.candidate + ": " + ended + ", before the first case", kExitEnvironment);
  return read_answers(*folder, cases, ended, silent);
}

}  // namespace lockstep::judging

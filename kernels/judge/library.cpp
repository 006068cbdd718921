// The child that loads a shared library (kernels/judge/judge_abi.h).
#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/judge/judge_abi.h"
#include "kernels/judge/memory.hpp"
#include "kernels/judge/run.hpp"

namespace lockstep::judging {
namespace {

using Json = nlohmann::ordered_json;

/// Nothing can be run; `status` is the program's.
struct Refusal {
  std::string text;
  ExitStatus status;
};

lockstep_candidate loaded(const std::string& candidate) {
  const std::size_t colon = candidate.find_last_of(':');
  const std::string symbol = candidate.substr(colon + 1);
  std::string file = candidate.substr(0, colon);
  if (!std::filesystem::exists(file))
    throw Refusal{file + ": there is no such file", kExitBadInput};
  file = std::filesystem::absolute(file).string();  // dlopen searches for what has no slash
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw Refusal{fmt::format("{} cannot be loaded: {}", file, ::dlerror()), kExitEnvironment};
  void* const function = ::dlsym(library, symbol.c_str());
  if (function == nullptr)
    throw Refusal{fmt::format("{} exports no function `{}`: declare it as in judge_abi.h, extern "
                              "\"C\" in C++",
                              file, symbol),
                  kExitBadInput};
  return reinterpret_cast<lockstep_candidate>(function);
}

/// The tensors of one case where the candidate gets them.
class Arguments {
 public:
  Arguments(Place& place, const JudgedKernel& operation, const Case& c) : place_(place) {
    std::int64_t bytes = 0;
    for (const Tensor& tensor : c.tensors) bytes += tensor.allocation_bytes();
    bytes_ = bytes;
    memory_ = place.allocate(bytes);
    char* data = memory_;
    for (const Tensor& tensor : c.tensors) {
      lockstep_tensor one{};
      one.name = tensor.name.c_str();
      one.data = data + kGuardBytes;
      one.dtype = static_cast<std::int32_t>(tensor.type);
      one.rank = static_cast<std::int32_t>(tensor.extents.size());
      std::copy(tensor.extents.begin(), tensor.extents.end(), one.extents);
      std::copy(tensor.strides.begin(), tensor.strides.end(), one.strides);
      tensors_.push_back(one);
      data += tensor.allocation_bytes();
    }
    for (const Scalar& scalar : c.scalars) scalars_.push_back(abi_scalar(scalar));
    call_ = {.abi = LOCKSTEP_JUDGE_ABI,
             .device = place.is_gpu() ? LOCKSTEP_CUDA : LOCKSTEP_HOST,
             .operation = operation.name.data(),
             .case_name = c.name.c_str(),
             .tensors = tensors_.data(),
             .tensor_count = static_cast<std::int64_t>(tensors_.size()),
             .scalars = scalars_.data(),
             .scalar_count = static_cast<std::int64_t>(scalars_.size()),
             .stream = place.stream(),
             .message = message_,
             .message_size = sizeof message_};
  }
  ~Arguments() { place_.release(memory_); }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void set(const Bytes& bytes) { place_.upload(memory_, bytes.data(), bytes_); }
  Bytes get() const {
    Bytes bytes(static_cast<std::size_t>(bytes_));
    place_.download(bytes.data(), memory_, bytes_);
    return bytes;
  }
  int call(lockstep_candidate function) {
    message_[0] = 0;
    return function(&call_);
  }
  const char* message() const { return message_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  static lockstep_scalar abi_scalar(const Scalar& scalar) {
    lockstep_scalar one{.name = scalar.name.c_str()};
    if (const auto* const text = std::get_if<std::string>(&scalar.value)) one.text = text->c_str();
    if (const auto* const flag = std::get_if<bool>(&scalar.value)) one.number = *flag ? 1 : 0;
    if (const auto* const whole = std::get_if<std::int64_t>(&scalar.value))
      one.number = static_cast<double>(*whole);
    if (const auto* const number = std::get_if<double>(&scalar.value)) one.number = *number;
    return one;
  }

  Place& place_;
  std::int64_t bytes_ = 0;
  char* memory_ = nullptr;
  std::vector<lockstep_tensor> tensors_;
  std::vector<lockstep_scalar> scalars_;
  char message_[512] = {};
  lockstep_call call_{};
};

Bytes inputs_of(const Case& c, Fill fill) {
  Bytes all;
  for (const Tensor& tensor : c.tensors) {
    const Bytes one = allocation_of(tensor, fill);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

Json timed(Place& place, const JudgedKernel& operation, const Case& c,
           lockstep_candidate function) {
  constexpr std::int64_t kMostSets = 16;
  const Bytes inputs = inputs_of(c, Fill::finite);
  std::vector<std::unique_ptr<Arguments>> sets;
  std::int64_t bytes = 0;
  while (sets.empty() ||
         (bytes < place.cold_bytes() && static_cast<std::int64_t>(sets.size()) < kMostSets)) {
    sets.push_back(std::make_unique<Arguments>(place, operation, c));
    sets.back()->set(inputs);
    bytes += sets.back()->bytes();
  }
  const Timing timing = place.time(
      [&](std::size_t set) {
        if (sets[set]->call(function) != LOCKSTEP_OK)
          throw std::runtime_error("the candidate failed while it was timed");
      },
      sets.size());
  return {{"time_us", timing.us}, {"how", timing.how}};
}

Json run_case(Place& place, const JudgedKernel& operation, const Case& c, std::size_t number,
              lockstep_candidate function, const std::string& folder, bool with_time) {
  for (std::size_t run = 0; run < std::size(kRunFills); ++run) {
    Arguments arguments(place, operation, c);
    arguments.set(inputs_of(c, kRunFills[run]));
    const int status = arguments.call(function);
    place.finish();
    if (status == LOCKSTEP_UNSUPPORTED)
      return {{"status", "unsupported"}, {"message", arguments.message()}};
    if (status != LOCKSTEP_OK)
      return {
          {"status", "raised"},
          {"message", fmt::format("it returned {}{}{}", status,
                                  arguments.message()[0] != 0 ? ": " : "", arguments.message())}};
    const Bytes bytes = arguments.get();
    std::ofstream(fmt::format("{}/out_{}_{}.bin", folder, number, run), std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  Json done{{"status", "done"}};
  if (c.timed && with_time) done.update(timed(place, operation, c, function));
  return done;
}

}  // namespace

int run_library(const JudgedKernel& operation, const std::vector<Case>& cases,
                const JudgeRequest& request, const std::string& folder) {
  try {
    const lockstep_candidate function = loaded(request.candidate);
    std::unique_ptr<Place> place = request.device == "cuda" ? cuda_place() : host_place();
    if (!place)
      throw Refusal{"--device cuda needs a build with CUDA (LOCKSTEP_CUDA=on, where nvcc is)",
                    kExitEnvironment};
    const bool any_timed = request.timed && std::any_of(cases.begin(), cases.end(),
                                                        [](const Case& c) { return c.timed; });
    write_child_file(folder + "/machine.json",
                     Json{{"device", place->name()},
                          {"gpu", place->is_gpu()},
                          {"copy_gbps", any_timed ? place->copy_gbps() : 0.0}}
                         .dump());
    std::string broken;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      Json done{{"status", "unsupported"}, {"message", broken}};
      try {
        if (broken.empty())
          done = run_case(*place, operation, cases[i], i, function, folder, request.timed);
      } catch (const std::exception& error) {
        done = {{"status", "raised"}, {"message", error.what()}};
        if (place->is_gpu())  // an illegal access leaves nothing that could run on
          broken = "not run: the GPU cannot be used behind the error of " + cases[i].name;
      }
      write_child_file(fmt::format("{}/done_{}.json", folder, i), done.dump());
    }
    return kExitPass;
  } catch (const Refusal& refusal) {
    write_child_file(folder + "/environment.json",
                     Json{{"text", refusal.text}, {"status", refusal.status}}.dump());
    return refusal.status;
  } catch (const std::exception& error) {
    write_child_file(folder + "/environment.json",
                     Json{{"text", error.what()}, {"status", kExitEnvironment}}.dump());
    return kExitEnvironment;
  }
}

}  // namespace lockstep::judging

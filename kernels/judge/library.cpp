// The process that loads a shared library (kernels/judge/judge_abi.h) and answers the requests of
// run.hpp.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "kernels/judge/judge_abi.h"
#include "kernels/judge/memory.hpp"
#include "kernels/judge/run.hpp"

namespace lockstep::judging {
namespace {

using Json = nlohmann::ordered_json;

/// The candidate cannot be run; `status` is the exit status of the program.
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
  file =
      std::filesystem::absolute(file).string();  // dlopen would search the system for a bare name
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

/// The announced case in the types of the candidate's call. Names keep their addresses as long as
/// the case lasts.
struct CallShape {
  std::string operation;
  Json described;
  std::vector<lockstep_tensor> tensors;  ///< `data` holds an offset instead of an address
  std::vector<lockstep_scalar> scalars;
  std::int64_t bytes = 0;

  // NOLINTNEXTLINE(bugprone-exception-escape): making a null Json throws nothing.
  CallShape() = default;
  CallShape(std::string operation_name, Json request)
      : operation(std::move(operation_name)), described(std::move(request)) {
    bytes = described.at("bytes").get<std::int64_t>();
    for (const Json& t : described.at("tensors")) {
      lockstep_tensor one{};
      one.name = t.at("name").get_ref<const std::string&>().c_str();
      one.dtype = t.at("type").get<std::int32_t>();
      one.rank = static_cast<std::int32_t>(t.at("extents").size());
      for (std::size_t d = 0; d < t.at("extents").size(); ++d) {
        one.extents[d] = t.at("extents")[d].get<std::int64_t>();
        one.strides[d] = t.at("strides")[d].get<std::int64_t>();
      }
      tensors.push_back(one);
    }
    for (const auto& [name, value] : described.at("scalars").items()) {
      lockstep_scalar one{};
      one.name = name.c_str();
      if (value.is_string()) one.text = value.get_ref<const std::string&>().c_str();
      if (value.is_boolean()) one.number = value.get<bool>() ? 1 : 0;
      if (value.is_number()) one.number = value.get<double>();
      scalars.push_back(one);
    }
  }
};

/// A tensor whose dimension 0 has the stride `far`, in memory that is poison but for it.
class FarTensor {
 public:
  FarTensor(Place& place, char* near, const lockstep_tensor& tensor, std::int64_t near_stride)
      : name(tensor.name),
        place_(place),
        near_(near),
        rows_(tensor.extents[0]),
        near_step_(near_stride * element_bytes(tensor)),
        step_(tensor.strides[0] * element_bytes(tensor)),
        row_(row_elements(tensor) * element_bytes(tensor)),
        bytes_(2 * kGuardBytes + (rows_ - 1) * step_ + row_),
        poison_(static_cast<std::size_t>(kPart), kPoisonByte),
        memory_(place.allocate(bytes_)) {
    in_parts(0, bytes_, [&](std::int64_t at, std::int64_t size) {
      place_.copy(memory_ + at, poison_.data(), size);
      return true;
    });
  }
  ~FarTensor() { place_.release(memory_); }
  FarTensor(const FarTensor&) = delete;
  FarTensor& operator=(const FarTensor&) = delete;

  const std::string name;
  char* data() { return memory_ + kGuardBytes; }
  /// Copies the rows to where the candidate finds them.
  void fill() {
    for (std::int64_t i = 0; i < rows_; ++i)
      place_.copy(data() + i * step_, near_ + i * near_step_, row_);
  }
  /// Copies them back; tells whether anything between them was written.
  bool take() {
    std::int64_t begin = 0;
    bool strayed = false;
    for (std::int64_t i = 0; i <= rows_; ++i) {
      const std::int64_t row = kGuardBytes + i * step_;
      strayed |= !is_poison(begin, i < rows_ ? row : bytes_);
      begin = row + row_;
      if (i < rows_) place_.copy(near_ + i * near_step_, memory_ + row, row_);
    }
    return strayed;
  }

 private:
  static constexpr std::int64_t kPart = std::int64_t{1} << 26;

  static std::int64_t element_bytes(const lockstep_tensor& tensor) {
    return size_of(static_cast<ElementType>(tensor.dtype));
  }
  /// From the first element of a row to the end of its last.
  static std::int64_t row_elements(const lockstep_tensor& tensor) {
    std::int64_t last = 0;
    for (std::int32_t d = 1; d < tensor.rank; ++d)
      last += (tensor.extents[d] - 1) * tensor.strides[d];
    return last + 1;
  }
  /// Calls body(at, size) for the parts of a range until one says false; whether none has.
  template <class Body>
  static bool in_parts(std::int64_t begin, std::int64_t end, Body body) {
    for (std::int64_t at = begin; at < end; at += kPart)
      if (!body(at, std::min(kPart, end - at))) return false;
    return true;
  }
  bool is_poison(std::int64_t begin, std::int64_t end) {
    Bytes there(static_cast<std::size_t>(std::min(kPart, end - begin)));
    return in_parts(begin, end, [&](std::int64_t at, std::int64_t size) {
      place_.copy(there.data(), memory_ + at, size);
      return std::equal(there.begin(), there.begin() + size, poison_.begin());
    });
  }

  Place& place_;
  char* near_;
  std::int64_t rows_, near_step_, step_, row_, bytes_;  ///< steps and sizes in bytes
  Bytes poison_;
  char* memory_;
};

/// The memory and the tensors of one call.
class Arguments {
 public:
  Arguments(Place& place, const CallShape& shape)
      : place_(place), bytes_(shape.bytes), tensors_(shape.tensors) {
    memory_ = place.allocate(bytes_);
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const Json& described = shape.described.at("tensors")[i];
      char* const near = memory_ + described.at("offset").get<std::int64_t>() + kGuardBytes;
      tensors_[i].data = near;
      if (described.at("far") == 0) continue;
      const std::int64_t near_stride =
          std::exchange(tensors_[i].strides[0], described.at("far").get<std::int64_t>());
      far_.push_back(std::make_unique<FarTensor>(place, near, tensors_[i], near_stride));
      tensors_[i].data = far_.back()->data();
    }
    call_ = {.abi = LOCKSTEP_JUDGE_ABI,
             .device = place.is_gpu() ? LOCKSTEP_CUDA : LOCKSTEP_HOST,
             .operation = shape.operation.c_str(),
             .case_name = shape.described.at("name").get_ref<const std::string&>().c_str(),
             .tensors = tensors_.data(),
             .tensor_count = static_cast<std::int64_t>(tensors_.size()),
             .scalars = shape.scalars.data(),
             .scalar_count = static_cast<std::int64_t>(shape.scalars.size()),
             .stream = place.stream(),
             .message = message_,
             .message_size = sizeof message_};
  }
  ~Arguments() { place_.release(memory_); }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  char* memory() { return memory_; }
  void fill_far() {
    for (const auto& one : far_) one->fill();
  }
  /// Copies far tensors back; names those between whose rows something was written.
  std::string take_far() {
    std::string strayed;
    for (const auto& one : far_)
      if (one->take()) strayed += (strayed.empty() ? "" : ", ") + one->name;
    return strayed;
  }
  int call(lockstep_candidate function) {
    message_[0] = 0;
    return function(&call_);
  }
  std::string message() const { return {message_, ::strnlen(message_, sizeof message_)}; }

 private:
  Place& place_;
  std::int64_t bytes_;
  char* memory_ = nullptr;
  std::vector<lockstep_tensor> tensors_;
  std::vector<std::unique_ptr<FarTensor>> far_;
  char message_[512] = {};
  lockstep_call call_{};
};

/// Answers requests until the pipe ends.
class Server {
 public:
  Server(std::string operation, const JudgeRequest& request, int shared)
      : operation_(std::move(operation)), request_(request), shared_(shared) {}

  /// Answers a request; an exception becomes an answer with its message.
  Json safe_answer(const Json& request) {
    try {
      return answer(request);
    } catch (const Refusal& refusal) {
      return {{"refused", refusal.text}, {"status", refusal.status}};
    } catch (const std::exception& error) {
      return {{"outcome", "raised"}, {"message", error.what()}, {"broken", !place_works()}};
    }
  }

 private:
  Json answer(const Json& request) {
    const std::string what = request.at("do");
    if (what == "machine") return machine(request.at("copy_rate"));
    if (what == "load") function_ = loaded(request_.candidate);
    if (what == "case") {
      sets_.clear();
      shape_ = CallShape(operation_, request);
    }
    if (what == "run") return run();
    if (what == "sets") make_sets(request.at("count"));
    if (what == "place") place_sets(request.at("first"));
    if (what == "record") return {{"how", place_->record(launches())}};
    if (what == "calls") return calls();
    if (what == "fetch") send(sets_.at(request.at("index"))->memory(), 2 * shape_.bytes);
    return Json::object();
  }

  /// Whether the device still works: after an illegal access nothing can run on a GPU any more.
  bool place_works() {
    try {
      if (place_) place_->finish();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  Json machine(bool with_copy_rate) {
    try {
      place_ = request_.device == "cuda" ? cuda_place() : host_place();
    } catch (const std::exception& error) {
      throw Refusal{fmt::format("--device {}: {}", request_.device, error.what()),
                    kExitEnvironment};
    }
    if (!place_)
      throw Refusal{"--device cuda needs a build with CUDA (LOCKSTEP_CUDA=on, where nvcc is)",
                    kExitEnvironment};
    return {{"device", place_->name()},
            {"gpu", place_->is_gpu()},
            {"cold_bytes", place_->cold_bytes()},
            {"copy_gbps", with_copy_rate ? place_->copy_gbps() : 0.0}};
  }

  /// Copies input number `which` of the shared memory to `to`.
  void receive(char* to, std::int64_t which) {
    staging_.resize(static_cast<std::size_t>(shape_.bytes));
    if (!read_at(shared_, which * shape_.bytes, staging_.data(), shape_.bytes))
      throw std::runtime_error("the inputs cannot be read");
    place_->copy(to, staging_.data(), shape_.bytes);
  }
  void send(const char* from, std::int64_t offset) {
    staging_.resize(static_cast<std::size_t>(shape_.bytes));
    place_->copy(staging_.data(), from, shape_.bytes);
    if (!write_at(shared_, offset, staging_.data(), shape_.bytes))
      throw std::runtime_error("the results cannot be written");
  }

  static Json outcome_of(int status, const std::string& said) {
    if (status == LOCKSTEP_OK) return {{"outcome", "done"}};
    if (status == LOCKSTEP_UNSUPPORTED) return {{"outcome", "unsupported"}, {"message", said}};
    return {{"outcome", "raised"},
            {"message", fmt::format("it returned {}{}{}", status, said.empty() ? "" : ": ", said)}};
  }

  Json run() {
    Arguments arguments(*place_, shape_);
    receive(arguments.memory(), 0);
    arguments.fill_far();
    const int status = arguments.call(function_);
    place_->finish();
    Json answer = outcome_of(status, arguments.message());
    if (status != LOCKSTEP_OK) return answer;
    answer["strayed"] = arguments.take_far();
    send(arguments.memory(), 0);
    return answer;
  }

  void make_sets(std::int64_t count) {
    place_->forget();
    sets_.clear();
    for (std::unique_ptr<Arguments>& one : inputs_) one.reset();
    for (std::int64_t i = 0; i < count; ++i)
      sets_.push_back(std::make_unique<Arguments>(*place_, shape_));
    if (count == 0) return;
    for (int which = 0; which < 2; ++which) {
      inputs_[which] = std::make_unique<Arguments>(*place_, shape_);
      receive(inputs_[which]->memory(), which);
    }
  }
  void place_sets(std::size_t first) {
    for (std::size_t i = 0; i < sets_.size(); ++i)
      place_->copy(sets_[i]->memory(), inputs_[(first + i) % 2]->memory(), shape_.bytes);
    place_->finish();
  }

  Launches launches() {
    return {[this](std::size_t set) {
              const int status = sets_[set]->call(function_);
              if (status != LOCKSTEP_OK) failed_ = outcome_of(status, sets_[set]->message());
            },
            sets_.size()};
  }
  Json calls() {
    failed_.reset();
    const double us = place_->run(launches());
    if (failed_) return *failed_;
    return {{"outcome", "done"}, {"device_us", us}};
  }

  std::string operation_;
  JudgeRequest request_;
  int shared_;
  std::unique_ptr<Place> place_;
  lockstep_candidate function_ = nullptr;
  CallShape shape_;
  std::vector<std::unique_ptr<Arguments>> sets_;
  std::unique_ptr<Arguments> inputs_[2];
  Bytes staging_;
  std::optional<Json> failed_;
};

}  // namespace

int run_library(const std::string& operation, const JudgeRequest& request, int shared) {
  // The judge's pipes move to other descriptors, and the candidate's output to standard error.
  std::FILE* const requests = ::fdopen(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3), "r");
  std::FILE* const answers = ::fdopen(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3), "w");
  if (requests == nullptr || answers == nullptr) return kExitEnvironment;
  ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  ::dup2(STDERR_FILENO, STDOUT_FILENO);
  Server server(operation, request, shared);
  char* line = nullptr;
  std::size_t room = 0;
  while (::getline(&line, &room, requests) > 0) {
    const Json asked = Json::parse(line);
    Json answer = server.safe_answer(asked);
    answer["n"] = asked.at("n");
    const std::string text = answer.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    std::fwrite(text.data(), 1, text.size(), answers);
    std::fflush(answers);
  }
  return kExitPass;
}

}  // namespace lockstep::judging

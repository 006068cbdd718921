// Times a decode step of Qwen3 in the C++ runtime on a GPU, in each of its forms:
//
//   lockstep_static_kv_times FOLDER PROMPT STEPS
//
// FOLDER has packages for a GPU, made by `python3 fixtures/subjects/static_kv packages`. All rows
// get PROMPT tokens; then five rounds of STEPS decode steps are timed as a server runs them: tokens
// come from the host, logits stay on the device. The output is JSON: for each form the microseconds
// of a step in the best round ("us") and in the middle one ("median_us").
#include <ATen/cuda/CUDAContext.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>

#include "kernels/torch/static_kv/cuda_graph.hpp"
#include "kernels/torch/static_kv/packages.hpp"
#include "kernels/torch/static_kv/torch_qwen3.hpp"
#include "reference/base/require.hpp"

namespace {

using namespace lockstep;
using namespace lockstep::static_kv;

constexpr int kRounds = 5, kWarmSteps = 4;

NewColumns columns(std::int64_t rows, std::int64_t first, std::int64_t count) {
  NewColumns made;
  for (std::int64_t b = 0; b < rows; ++b) {
    Tokens ids, positions;
    for (std::int64_t i = first; i < first + count; ++i) {
      ids.push_back(static_cast<std::int32_t>(1 + (7 * i + b) % 90));
      positions.push_back(static_cast<std::int32_t>(i));
    }
    made.ids.push_back(ids);
    made.positions.push_back(positions);
    made.real.emplace_back(static_cast<std::size_t>(count), 1);
  }
  return made;
}

template <class Model>
nlohmann::json step_us(Model& model, std::int64_t rows, std::int64_t prompt, std::int64_t steps) {
  const auto finish = [] { at::cuda::getCurrentCUDAStream().synchronize(); };
  const auto launched = [&](std::int64_t first, std::int64_t count) {
    const auto logits = model.launch(columns(rows, first, count));
    require(logits.has_value(), "the prompt and all steps fit into the cache");
  };
  model.clear();
  launched(0, prompt);
  std::int64_t at = prompt;
  for (int i = 0; i < kWarmSteps; ++i) launched(at++, 1);
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    finish();
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < steps; ++i) launched(at++, 1);
    finish();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    rounds.push_back(time.count() / static_cast<double>(steps));
  }
  std::sort(rounds.begin(), rounds.end());
  return {{"us", rounds.front()}, {"median_us", rounds[kRounds / 2]}};
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return std::cerr << "lockstep_static_kv_times FOLDER PROMPT STEPS\n", 2;
  if (!at::hasCUDA()) return std::cerr << "skipped: there is no GPU\n", 77;
  const at::InferenceMode guard;
  const std::string folder = words[1];
  const std::int64_t prompt = std::atoll(words[2]), steps = std::atoll(words[3]);
  const auto packages = load_packages(folder);
  const auto checkpoint = reference::read_qwen3(folder);
  if (!packages || !checkpoint)
    return std::cerr << (packages ? checkpoint.error() : packages.error()).text << '\n', 3;
  const TorchQwen3 eager(*checkpoint, packages->head.scalar_type(), at::kCUDA);
  const Program sidecar = [&](const std::vector<at::Tensor>& in) { return eager.step(in); };
  const Program in_place = [&](const std::vector<at::Tensor>& in) {
    return eager.step_in_place(in);
  };
  // Every form runs the prompt as one eager call; only its decode steps differ.
  const auto with = [&](const Program& decode) {
    Programs programs = *packages;
    programs.buckets = {{1, decode}, {prompt, sidecar}};
    return programs;
  };
  nlohmann::json times;
  const auto called = [&](const char* name, const Program& decode) {
    Runtime runtime(with(decode));
    times[name] = step_us(runtime, packages->rows, prompt, steps);
  };
  const auto replayed = [&](const char* name, const Program& decode) {
    GraphRuntime runtime(with(decode));
    runtime.capture(captured);
    times[name] = step_us(runtime, packages->rows, prompt, steps);
  };
  called("C++ eager, sidecar", sidecar);
  called("C++ package, sidecar", packages->buckets.at(1));
  replayed("C++ eager, sidecar, CUDA graph", sidecar);
  replayed("C++ eager, in place, CUDA graph", in_place);
  replayed("C++ package, in place, CUDA graph", packages->in_place.at(1));
  replayed("C++ package, sidecar, CUDA graph", packages->buckets.at(1));
  std::cout << times.dump(1) << '\n';
}

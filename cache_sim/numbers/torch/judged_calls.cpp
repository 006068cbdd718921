#include "cache_sim/numbers/torch/judged_calls.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/judge/operation.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep::cache_sim {

using at::Tensor;

namespace {

thread_local JudgedCalls* active_calls = nullptr;

judging::ElementType type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16: return judging::ElementType::bf16;
    case at::kHalf: return judging::ElementType::fp16;
    case at::kInt: return judging::ElementType::int32;
    case at::kBool: return judging::ElementType::boolean;
    default: return judging::ElementType::float32;
  }
}

std::vector<double> values_of(const Tensor& tensor) {
  const Tensor host = tensor.to(at::kCPU).to(at::kDouble).contiguous();
  return {host.data_ptr<double>(), host.data_ptr<double>() + host.numel()};
}

judging::Tensor described(const std::string& name, const Tensor& tensor) {
  judging::Tensor described{.name = name, .type = type_of(tensor), .extents = tensor.sizes().vec()};
  described.strides = judging::contiguous(described.extents);
  described.values = values_of(tensor);
  return described;
}

const judging::JudgedKernel* definition_of(const std::string& name) {
  for (const judging::JudgedKernel* const one : judging::judged_kernels())
    if (one->name == name) return one;
  return nullptr;
}

/// The call as a case of the judge.
judging::Case case_of(const Arguments& arguments) {
  judging::Case all{.name = "call"};
  for (const auto& [name, value] : arguments) {
    if (value.isTensor()) all.tensors.push_back(described(name, value.toTensor()));
    if (value.isBool()) all.scalars.push_back({name, value.toBool()});
    if (value.isInt()) all.scalars.push_back({name, value.toInt()});
    if (value.isDouble()) all.scalars.push_back({name, value.toDouble()});
    if (value.isString()) all.scalars.push_back({name, value.toStringRef()});
  }
  return all;
}

Array<double, 2> rows_of(const std::vector<double>& values, std::int64_t columns) {
  Array<double, 2> rows(Shape<2>{
      static_cast<std::int64_t>(values.size()) / std::max<std::int64_t>(columns, 1), columns});
  std::copy(values.begin(), values.end(), rows.data());
  return rows;
}

}  // namespace

JudgedCalls::JudgedCalls() : before_(std::exchange(active_calls, this)) {}
JudgedCalls::~JudgedCalls() {
  active_calls = before_;
}
JudgedCalls* JudgedCalls::active() {
  return active_calls;
}

namespace {

/// Times the error of a definition in float that a call may have: four times the judge's. A search
/// makes a hundred thousand calls, and the rarest of them are told; sums of tensor cores were 9.5
/// times as wrong once.
constexpr double kFactor = 16;
/// A result of fewer numbers is not judged: the few rows of its definition in float may happen to
/// be exact.
constexpr std::size_t kFewestJudged = 128;

/// The sentence where `actual` is beyond its yardstick.
std::optional<std::string> beyond(const std::string& what, const std::vector<double>& actual,
                                  const std::vector<double>& yardstick,
                                  const std::vector<double>& truth, std::int64_t columns,
                                  Format format) {
  if (actual.size() < kFewestJudged) return {};
  const Verdict verdict =
      lockstep::judge(rows_of(actual, columns), rows_of(yardstick, columns),
                      rows_of(truth, columns), Yardstick{.factor = kFactor, .format = format});
  if (verdict.pass) return {};
  return what + ": " + verdict.text;
}

}  // namespace

void JudgedCalls::judge(const std::string& what, const Tensor& actual, const Tensor& yardstick,
                        const Tensor& truth) {
  ++judged_;
  const auto found = beyond(what, values_of(actual), values_of(yardstick), values_of(truth),
                            actual.size(-1), judging::format_of(type_of(actual)));
  if (found) wrong_.push_back(*found);
}

std::vector<c10::IValue> JudgedCalls::hear(const std::string& name, const Arguments& arguments,
                                           const std::function<std::vector<c10::IValue>()>& run) {
  const judging::JudgedKernel* const definition = definition_of(name);
  // The definition of latent attention has the sizes of its kernel.
  const bool other_sizes =
      name == "mla_decode" && arguments.at("kv_cache").toTensor().size(-1) != 576;
  if (definition == nullptr || definition->exact || other_sizes) return run();
  judging::Case call = case_of(arguments);
  std::vector<c10::IValue> results = run();
  call.tensors.push_back(described("out", results[0].toTensor()));
  const judging::Answer truth = definition->truth(call, ""),
                        yardstick = definition->yardstick(call, "");
  for (const auto& [part, right] : truth) {
    Tensor actual;
    if (part == "out")
      actual = results[0].toTensor();
    else if (part == "lse")
      continue;  // nobody reads it
    else
      actual = arguments.at(part).toTensor();
    ++judged_;
    const auto found = beyond(name + "'s " + part, values_of(actual), yardstick.at(part), right,
                              actual.size(-1), judging::format_of(type_of(actual)));
    if (found) wrong_.push_back(*found);
  }
  return results;
}

// --- Layers

namespace {

class JudgedLayers final : public TensorLayers {
 public:
  explicit JudgedLayers(std::shared_ptr<const TensorLayers> layers) : own_(std::move(layers)) {}

  at::Device device() const override { return own_->device(); }

  Tensor product(const Tensor& x, const Tensor& weight) const override {
    return judged(
        "product", [](const TensorLayers& l, const auto&... in) { return l.product(in...); }, x,
        weight);
  }
  Tensor logits(const Tensor& x, const Tensor& head) const override {
    return judged(
        "logits", [](const TensorLayers& l, const auto&... in) { return l.logits(in...); }, x,
        head);
  }
  Tensor products(const Tensor& x, const Tensor& weight) const override {
    return judged(
        "batched_product",
        [](const TensorLayers& l, const auto&... in) { return l.products(in...); }, x, weight);
  }
  Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) const override {
    return judged(
        "rms_norm",
        [eps](const TensorLayers& l, const auto&... in) { return l.rms_norm(in..., eps); }, x,
        weight);
  }
  Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                        bool before, std::int64_t groups) const override {
    return judged(
        "gated_rms_norm",
        [&](const TensorLayers& l, const auto&... in) {
          return l.gated_rms_norm(in..., eps, before, groups);
        },
        x, gate, weight);
  }
  Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& frequencies, double magnitude,
              bool interleaved) const override {
    return judged(
        "rope",
        [&](const TensorLayers& l, const auto&... in) {
          return l.rope(in..., magnitude, interleaved);
        },
        x, positions, frequencies);
  }
  void store(const Tensor& pool, const Tensor& x, const Tensor& slots) const override {
    own_->store(pool, x, slots);
  }
  Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, const SeenSlots& seen,
                   double scale) const override {
    return judged(
        "softmax_attention",
        [&](const TensorLayers& l, const Tensor& a, const Tensor& b, const Tensor& c,
            const auto&... lists) { return l.attention(a, b, c, {lists...}, scale); },
        q, keys, values, seen.table, seen.lengths, seen.starts);
  }
  /// The choice of experts is none of rounding's: its logits are judged.
  Routes route(const Tensor& logits, const std::optional<Tensor>& bias,
               const reference::ExpertsUnit& unit) const override {
    return own_->route(logits, bias, unit);
  }
  Tensor swiglu(const Tensor& gate, const Tensor& up) const override {
    return judged(
        "swiglu", [](const TensorLayers& l, const auto&... in) { return l.swiglu(in...); }, gate,
        up);
  }
  Tensor squared_relu(const Tensor& x) const override {
    return judged(
        "squared_relu",
        [](const TensorLayers& l, const auto&... in) { return l.squared_relu(in...); }, x);
  }
  Tensor sigmoid_gated(const Tensor& x, const Tensor& gate) const override {
    return judged(
        "sigmoid_gated",
        [](const TensorLayers& l, const auto&... in) { return l.sigmoid_gated(in...); }, x, gate);
  }
  Tensor experts(const Tensor& x, const Routes& routes, const ExpertMatrices& matrices,
                 const reference::ExpertsUnit& unit) const override {
    return judged(
        "experts",
        [&](const TensorLayers& l, const Tensor& a, const Tensor& b, const Tensor& c,
            const Tensor& experts, const Tensor& weights) {
          return l.experts(a, {experts, weights}, {b, c}, unit);
        },
        x, matrices.up, matrices.down, routes.experts, routes.weights);
  }

  std::function<void()> captured(std::function<void()> work) const override {
    return own_->captured(std::move(work));
  }

 private:
  template <class Layer, class... In>
  Tensor judged(const char* what, const Layer& layer, const In&... in) const {
    const Tensor result = layer(*own_, in...);
    if (JudgedCalls* const calls = JudgedCalls::active())
      calls->judge(what, result, layer(*float_, in.to(at::kCPU)...),
                   layer(*exact_, in.to(at::kCPU)...));
    return result;
  }

  std::shared_ptr<const TensorLayers> own_, float_ = host_layers(), exact_ = exact_layers();
};

}  // namespace

std::shared_ptr<const TensorLayers> judged_layers(std::shared_ptr<const TensorLayers> layers) {
  return std::make_shared<JudgedLayers>(std::move(layers));
}

}  // namespace lockstep::cache_sim

#include "reference/models/hybrid/hybrid_units.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "reference/attention/mla_attention.hpp"
#include "reference/base/overloaded.hpp"
#include "reference/layers/moe_router.hpp"
#include "reference/layers/rope.hpp"
#include "reference/layers/squared_relu.hpp"
#include "reference/layers/swiglu.hpp"
#include "reference/recurrent/gated_delta_net.hpp"
#include "reference/recurrent/mamba_mixer.hpp"
#include "reference/tensors/times.hpp"

namespace lockstep::reference {
namespace {

/// Views of the tensors of one unit.
class Named {
 public:
  Named(const HybridWeights& weights, std::string at) : weights_(weights), at_(std::move(at)) {}

  TensorView<const double, 1> vector(const std::string& name) const {
    const HybridTensor& tensor = find(name);
    return make_view(tensor.values.data(),
                     Shape<1>{static_cast<std::int64_t>(tensor.values.size())});
  }
  /// [first extent, the others together]
  TensorView<const double, 2> matrix(const std::string& name) const {
    const HybridTensor& tensor = find(name);
    const std::int64_t rows = tensor.shape[0];
    return make_view(tensor.values.data(),
                     Shape<2>{rows, static_cast<std::int64_t>(tensor.values.size()) / rows});
  }
  TensorView<const double, 3> matrices(const std::string& name) const {
    const HybridTensor& tensor = find(name);
    return make_view(tensor.values.data(),
                     Shape<3>{tensor.shape[0], tensor.shape[1], tensor.shape[2]});
  }
  bool has(const std::string& name) const { return weights_.tensors.contains(at_ + name); }

 private:
  const HybridTensor& find(const std::string& name) const {
    const auto found = weights_.tensors.find(at_ + name);
    require(found != weights_.tensors.end(), "a model has all tensors of its configuration");
    return found->second;
  }
  const HybridWeights& weights_;
  std::string at_;
};

void add_to(const TensorView<double, 2>& sum, const Array<double, 2>& y) {
  for (std::int64_t t = 0; t < sum.extent(0); ++t)
    for (std::int64_t i = 0; i < sum.extent(1); ++i) sum(t, i) += y(t, i);
}

IndexView positions_of(const Batch& batch) {
  return make_view(batch.positions.data(),
                   Shape<1>{static_cast<std::int64_t>(batch.positions.size())});
}

/// Calls attend(tokens, seen): tokens [first, last) of the row see `seen`, the last of them all of
/// it, each one before it a slot less. Tokens of a tree are told one by one.
template <class Attend>
void for_queries(const PackedRow& row, const Attend& attend) {
  const std::int64_t chain = row.paths.empty() ? row.range.size() : row.row->inputs();
  if (chain > 0) attend(RowRange{0, chain}, row.seen_by(chain - 1));
  for (std::int64_t i = chain; i < row.range.size(); ++i)
    attend(RowRange{i, i + 1}, row.seen_by(i));
}

// --- Attention

class Attention final : public Unit {
 public:
  Attention(const HybridConfig& config, const AttentionUnit& u, const HybridUnit& unit,
            const HybridWeights& weights)
      : u_(u),
        eps_(config.eps),
        q_(Named(weights, unit.at).matrix("q_proj.weight")),
        k_(Named(weights, unit.at).matrix("k_proj.weight")),
        v_(Named(weights, unit.at).matrix("v_proj.weight")),
        o_(Named(weights, unit.at).matrix("o_proj.weight")) {
    if (u.head_norms) {
      q_norm_ = as_vector(norm_factors(config, weights, unit.at + "q_norm.weight").view());
      k_norm_ = as_vector(norm_factors(config, weights, unit.at + "k_norm.weight").view());
    }
    if (u.rotary_dims > 0) rope_ = plain_rope(u.rotary_dims, u.rope_theta);
  }

  std::size_t kv_size() const override {
    return static_cast<std::size_t>(2 * u_.kv_heads * u_.head_dim);
  }

  void add(const Inputs& x, const Batch& batch, TensorView<double, 2> sum) const override {
    const std::int64_t T = x.extent(0), d = u_.head_dim;
    Array<double, 2> q = projected(x, q_), k = projected(x, k_);
    const Array<double, 2> v = projected(x, v_);
    const std::int64_t per_head = u_.output_gate ? 2 * d : d;  // [query | gate]
    const auto queries =
        make_view(q.data(), Shape<3>{T, u_.heads, d}, Shape<3>{q.extent(1), per_head, 1});
    const auto keys = make_view(k.data(), Shape<3>{T, u_.kv_heads, d});
    turn(queries, q_norm_, batch);
    turn(keys, k_norm_, batch);
    store(k, v, batch);
    Array<double, 2> out(Shape<2>{T, u_.heads * d});
    for (const PackedRow& row : batch.rows)
      for_queries(row, [&](const RowRange& tokens, std::span<const std::uint32_t> seen) {
        attend_all(batch, row, tokens, seen, queries, out);
      });
    if (u_.output_gate) {
      const auto gates =
          make_view(q.data() + d, Shape<3>{T, u_.heads, d}, Shape<3>{q.extent(1), per_head, 1});
      for (std::int64_t t = 0; t < T; ++t)
        for (std::int64_t h = 0; h < u_.heads; ++h)
          for (std::int64_t i = 0; i < d; ++i) out(t, h * d + i) *= sigmoid(gates(t, h, i));
    }
    add_to(sum, projected<double>(out, o_));
  }

 private:
  /// Norms and rotates each head in place.
  void turn(const TensorView<double, 3>& heads, const Vector<double>& norm,
            const Batch& batch) const {
    if (u_.head_norms)
      for (std::int64_t t = 0; t < heads.extent(0); ++t)
        for (std::int64_t h = 0; h < heads.extent(1); ++h)
          mapped(at(heads, t, h)) = rms_normed<double>(as_vector(at(heads, t, h)), norm, eps_);
    if (u_.rotary_dims > 0)
      apply_rope<double>(rope_, positions_of(batch), RopePairs::half_split, heads);
  }

  /// Writes [k | v] of every token of the batch to its slot.
  void store(const Array<double, 2>& k, const Array<double, 2>& v, const Batch& batch) const {
    const std::size_t width = kv_size() / 2;
    for (const PackedRow& row : batch.rows)
      for (std::int64_t i = 0; row.row->writes_kv && i < row.range.size(); ++i) {
        const std::uint32_t slot = row.row->kv[static_cast<std::size_t>(row.row->begin + i)];
        double* const target = kv_at(batch, row, slot);
        std::memcpy(target, &k(row.range.begin + i, 0), width * sizeof(double));
        std::memcpy(target + width, &v(row.range.begin + i, 0), width * sizeof(double));
      }
  }

  void attend_all(const Batch& batch, const PackedRow& row, const RowRange& tokens,
                  std::span<const std::uint32_t> seen, const TensorView<double, 3>& queries,
                  Array<double, 2>& out) const {
    // A window leaves out the slots that even the first of these tokens does not see: they may
    // belong to somebody else by now.
    const auto length = static_cast<std::int64_t>(seen.size());
    const std::int64_t first_seen = length - tokens.size() + 1;  // tokens that the first one sees
    const std::int64_t hidden =
        u_.window > 0 ? std::max<std::int64_t>(0, first_seen - u_.window) : 0;
    seen = seen.subspan(static_cast<std::size_t>(hidden));
    const std::int64_t d = u_.head_dim, group = u_.heads / u_.kv_heads;
    for (std::int64_t head = 0; head < u_.kv_heads; ++head) {
      const Matrix<double> K = gathered(batch, row, seen, head * d, d);
      const Matrix<double> V = gathered(batch, row, seen, (u_.kv_heads + head) * d, d);
      for (std::int64_t i = 0; i < tokens.size(); ++i) {
        const std::int64_t end = first_seen - hidden + i;
        const std::int64_t n = u_.window > 0 ? std::min(end, u_.window) : end;
        const std::int64_t t = row.range.begin + tokens.begin + i;
        for (std::int64_t h = head * group; h < (head + 1) * group; ++h)
          mapped(at(out.view(), t)).segment(h * d, d) =
              attend<double>(as_vector(at(queries, t, h)), K.middleRows(end - n, n),
                             V.middleRows(end - n, n), 1 / std::sqrt(static_cast<double>(d)))
                  .out;
      }
    }
  }

  AttentionUnit u_;
  double eps_;
  TensorView<const double, 2> q_, k_, v_, o_;
  Vector<double> q_norm_, k_norm_;
  Rope<double> rope_;
};

class Latent final : public Unit {
 public:
  Latent(const LatentUnit& u, const HybridUnit& unit, const HybridWeights& weights)
      : u_(u),
        named_(weights, unit.at),
        o_(named_.matrix("o_proj.weight")),
        layer_{.H = u.heads,
               .dn = u.nope_dim,
               .dr = u.rope_dim,
               .q_a = named_.matrix("q_a_proj.weight"),
               .q_a_norm = named_.vector("q_a_layernorm.weight"),
               .q_b = named_.matrix("q_b_proj.weight"),
               .kv_a = named_.matrix("kv_a_proj_with_mqa.weight"),
               .kv_a_norm = named_.vector("kv_a_layernorm.weight")},
        up_(split_kv_b(named_.matrix("kv_b_proj.weight"), u.heads, u.nope_dim)),
        rope_(yarn_rope<double>(u.rope_dim, u.rope_theta,
                                {.factor = u.yarn_factor,
                                 .original_positions = u.yarn_positions,
                                 .mscale = 1.0,
                                 .mscale_all_dim = 1.0})) {}

  std::size_t kv_size() const override { return static_cast<std::size_t>(u_.latent + u_.rope_dim); }

  void add(const Inputs& x, const Batch& batch, TensorView<double, 2> sum) const override {
    const std::int64_t T = x.extent(0);
    const MlaProjected<double> p = mla_project(x, positions_of(batch), layer_, rope_);
    for (const PackedRow& row : batch.rows)
      for (std::int64_t i = 0; row.row->writes_kv && i < row.range.size(); ++i) {
        const std::uint32_t slot = row.row->kv[static_cast<std::size_t>(row.row->begin + i)];
        double* const target = kv_at(batch, row, slot);
        std::copy_n(&p.latent(row.range.begin + i, 0), u_.latent, target);
        std::copy_n(&p.k_pe(row.range.begin + i, 0), u_.rope_dim, target + u_.latent);
      }
    const Array<double, 3> q = absorbed_queries<double>(p.q_nope, p.q_pe, up_);
    const double scale =
        rope_.softmax_factor / std::sqrt(static_cast<double>(u_.nope_dim + u_.rope_dim));
    Array<double, 3> latents(Shape<3>{T, u_.heads, u_.latent});
    for (const PackedRow& row : batch.rows)
      for_queries(row, [&](const RowRange& tokens, std::span<const std::uint32_t> seen) {
        const Matrix<double> K =
            gathered(batch, row, seen, 0, static_cast<std::int64_t>(kv_size()));
        for (std::int64_t i = tokens.begin; i < tokens.end; ++i) {
          const std::int64_t n = K.rows() - (tokens.end - 1 - i), t = row.range.begin + i;
          for (std::int64_t h = 0; h < u_.heads; ++h)
            mapped(at(latents.view(), t, h)) =
                attend<double>(as_vector(at(q.view(), t, h)), K.topRows(n),
                               K.topLeftCorner(n, u_.latent), scale)
                    .out;
        }
      });
    Array<double, 3> out(Shape<3>{T, u_.heads, u_.value_dim});
    project_values<double>(std::as_const(latents).view(), up_, out);
    add_to(sum, projected<double>(
                    make_view<const double>(out.data(), Shape<2>{T, u_.heads * u_.value_dim}), o_));
  }

 private:
  LatentUnit u_;
  Named named_;
  TensorView<const double, 2> o_;
  MlaLayer<double> layer_;
  MlaUpWeights<double> up_;
  Rope<double> rope_;
};

// --- Units with states

/// A mixer with a state of [H, R, C] doubles and a window of [channels, width - 1] in front of it.
/// `run` computes the layer over one row.
template <class Layer, auto run>
class Recurrent final : public Unit {
 public:
  Recurrent(const Shape<3>& state, std::int64_t channels, std::int64_t width, const Layer& layer)
      : state_(state), window_{channels, width - 1}, layer_(layer) {}

  std::size_t recurrent_size() const override {
    return static_cast<std::size_t>(element_count(state_));
  }
  std::size_t conv_size() const override {
    return static_cast<std::size_t>(element_count(window_));
  }

  void add(const Inputs& x, const Batch& batch, TensorView<double, 2> sum) const override {
    Array<double, 2> y(shape_of(sum));
    for (const PackedRow& row : batch.rows) {
      const Inputs own = cut(x, row.range.begin, row.range.end);
      const TensorView<double, 2> out = cut(y.view(), row.range.begin, row.range.end);
      if (row.row->states_after != nullptr)
        verify(own, row, out);
      else
        run_pieces(own, row, batch.states, out);
    }
    add_to(sum, y);
  }

  void replay(const Inputs& x, std::span<double> state) const override {
    const auto size = static_cast<std::int64_t>(state.size());
    Array<double, 2> unused(shape_of(x));
    mix(x, {.update = true, .scan = true}, windows_at(state.data(), 1, size),
        states_at(state.data(), 1, size), unused, {});
  }

 private:
  using Snapshots = LayerSnapshots<double>;

  /// Runs the layer over one row, with the one state of `conv` and `state`.
  void mix(const Inputs& x, const LayerRun& how, const TensorView<double, 3>& conv,
           const TensorView<double, 4>& state, const TensorView<double, 2>& out,
           const std::optional<Snapshots>& snapshots) const {
    const std::int32_t starts[2] = {0, static_cast<std::int32_t>(x.extent(0))};
    const Rows rows{.query_start_loc = make_view(starts, Shape<1>{2})};
    run(x, layer_, rows, how, conv, state, out, snapshots);
  }

  /// `count` states, `step` doubles apart.
  TensorView<double, 4> states_at(double* first, std::int64_t count, std::int64_t step) const {
    return make_view(first + recurrent_first, Shape<4>{count, state_[0], state_[1], state_[2]},
                     Shape<4>{step, state_[1] * state_[2], state_[2], 1});
  }
  TensorView<double, 3> windows_at(double* first, std::int64_t count, std::int64_t step) const {
    return make_view(first + conv_first, Shape<3>{count, window_[0], window_[1]},
                     Shape<3>{step, window_[1], 1});
  }

  void verify(const Inputs& x, const PackedRow& row, const TensorView<double, 2>& out) const {
    const auto size = static_cast<std::int64_t>(row.state.size());
    double* const after = row.row->states_after;
    const IndexView parents = make_view(row.parents.data(), Shape<1>{row.range.size()});
    mix(x, {.update = true}, windows_at(row.state.data(), 1, size),
        states_at(row.state.data(), 1, size), out,
        Snapshots{.parents = parents,
                  .conv = windows_at(after, row.range.size(), size),
                  .state = states_at(after, row.range.size(), size)});
  }

  /// Runs the row piece by piece: a piece ends where a state is taken.
  void run_pieces(const Inputs& x, const PackedRow& row, const SlotPool& states,
                  const TensorView<double, 2>& out) const {
    const auto size = static_cast<std::int64_t>(row.state.size());
    const TensorView<double, 3> conv = windows_at(row.state.data(), 1, size);
    const TensorView<double, 4> state = states_at(row.state.data(), 1, size);
    std::int64_t done = 0;
    const auto run_to = [&](std::int64_t end) {
      if (end == done) return;
      const bool decodes = end - done == 1 && row.row->begin > 0;
      mix(cut(x, done, end), {.update = decodes, .scan = true}, conv, state, cut(out, done, end),
          {});
      done = end;
    };
    for (const HybridTake& take : row.row->takes) {
      run_to(take.after - row.row->begin);
      double* const target =
          states.at(take.slot + PackedRow::distance(row.row->state_layers, layer));
      if (take.recurrent)
        std::copy_n(row.state.data() + recurrent_first, recurrent_size(), target + recurrent_first);
      if (take.conv) std::copy_n(row.state.data() + conv_first, conv_size(), target + conv_first);
    }
    run_to(row.range.size() - row.row->padding);
    if (row.row->padding == 0) return;
    const std::vector<double> kept(row.state.begin(), row.state.end());
    run_to(row.range.size());
    std::ranges::copy(kept, row.state.begin());
  }

  Shape<3> state_;
  Shape<2> window_;
  Layer layer_;
};

std::unique_ptr<Unit> mamba(const HybridConfig& config, const MambaUnit& u, const Named& w) {
  return std::make_unique<Recurrent<MambaMixer<double>, mamba_mixer<double>>>(
      Shape<3>{u.heads, u.head_dim, u.state}, u.heads * u.head_dim + 2 * u.groups * u.state,
      u.width,
      MambaMixer<double>{.H = u.heads,
                         .P = u.head_dim,
                         .N = u.state,
                         .G = u.groups,
                         .in_proj = w.matrix("in_proj.weight"),
                         .conv_weight = w.matrix("conv1d.weight"),
                         .conv_bias = w.vector("conv1d.bias"),
                         .A_log = w.vector("A_log"),
                         .D = w.vector("D"),
                         .dt_bias = w.vector("dt_bias"),
                         .norm_weight = w.vector("norm.weight"),
                         .out_proj = w.matrix("out_proj.weight"),
                         .eps = config.eps});
}

std::unique_ptr<Unit> delta_net(const HybridConfig& config, const DeltaNetUnit& u, const Named& w) {
  return std::make_unique<Recurrent<GatedDeltaNet<double>, gated_delta_net<double>>>(
      Shape<3>{u.value_heads, u.value_dim, u.key_dim},
      2 * u.key_heads * u.key_dim + u.value_heads * u.value_dim, u.width,
      GatedDeltaNet<double>{.H = u.key_heads,
                            .HV = u.value_heads,
                            .K = u.key_dim,
                            .V = u.value_dim,
                            .qkvz = w.matrix("in_proj_qkvz.weight"),
                            .ba = w.matrix("in_proj_ba.weight"),
                            .conv_weight = w.matrix("conv1d.weight"),
                            .A_log = w.vector("A_log"),
                            .dt_bias = w.vector("dt_bias"),
                            .norm_weight = w.vector("norm.weight"),
                            .out_proj = w.matrix("out_proj.weight"),
                            .eps = config.eps});
}

// --- Feed-forward units

/// A feed-forward unit; `gate` only with FeedForward::swiglu.
struct ForwardWeights {
  FeedForward form;
  std::optional<TensorView<const double, 2>> gate;
  TensorView<const double, 2> up, down;

  void run(const Inputs& x, const TensorView<double, 2>& out) const {
    if (form == FeedForward::squared_relu) return squared_relu_mlp<double>(x, up, down, out);
    Array<double, 2> gated = projected(x, *gate);
    const Array<double, 2> raised = projected(x, up);
    swiglu_gate<double>(gated, raised, gated);
    mapped(out) = mapped(projected<double>(gated, down).view());
  }
};

ForwardWeights forward_weights(const Named& w, const std::string& at, FeedForward form) {
  ForwardWeights weights{.form = form,
                         .gate = {},
                         .up = w.matrix(at + "up_proj.weight"),
                         .down = w.matrix(at + "down_proj.weight")};
  if (form == FeedForward::swiglu) weights.gate = w.matrix(at + "gate_proj.weight");
  return weights;
}

class Mlp final : public Unit {
 public:
  Mlp(const MlpUnit& u, const Named& w) : weights_(forward_weights(w, "", u.form)) {}

  void add(const Inputs& x, const Batch&, TensorView<double, 2> sum) const override {
    Array<double, 2> y(shape_of(sum));
    weights_.run(x, y);
    add_to(sum, y);
  }

 private:
  ForwardWeights weights_;
};

class Experts final : public Unit {
 public:
  Experts(const ExpertsUnit& u, const Named& w)
      : router_(w.matrix("gate.weight")),
        options_{.experts_per_token = u.per_token,
                 .score = u.sigmoid_scores ? RouterScore::sigmoid : RouterScore::softmax,
                 .groups = u.groups,
                 .groups_kept = u.groups_kept,
                 .scale = u.scale},
        shared_(forward_weights(w, shared_expert_name(u), u.form)) {
    if (u.sigmoid_scores) options_.bias = w.vector("gate.e_score_correction_bias");
    if (u.shared_gate) shared_gate_ = w.matrix("shared_expert_gate.weight");
    const bool gated = u.form == FeedForward::swiglu;
    const auto first = w.matrices(gated ? "experts.gate_up_proj" : "experts.up_proj");
    const auto down = w.matrices("experts.down_proj");
    for (std::int64_t e = 0; e < u.experts; ++e) {
      const TensorView<const double, 2> own = at(first, e);
      ForwardWeights expert{.form = u.form, .gate = {}, .up = own, .down = at(down, e)};
      if (gated) {  // gate_up_proj stacks both
        expert.gate = cut(own, 0, u.inner);
        expert.up = cut(own, u.inner, 2 * u.inner);
      }
      experts_.push_back(expert);
    }
  }

  void add(const Inputs& x, const Batch&, TensorView<double, 2> sum) const override {
    const std::int64_t T = x.extent(0), D = x.extent(1);
    const Routing<double> to = route<double>(projected(x, router_), options_);
    Array<double, 2> y(Shape<2>{T, D}), one(Shape<2>{1, D});
    shared_.run(x, y);
    for (std::int64_t t = 0; t < T; ++t) {
      const Inputs own = cut(x, t, t + 1);
      if (shared_gate_)
        mapped(at(y.view(), t)) *= sigmoid(times<double>(*shared_gate_, as_vector(at(own, 0)))(0));
      for (std::int64_t i = 0; i < options_.experts_per_token; ++i) {
        experts_[static_cast<std::size_t>(to.experts(t, i))].run(own, one);
        mapped(at(y.view(), t)) += to.weights(t, i) * mapped(at(one.view(), 0));
      }
    }
    add_to(sum, y);
  }

 private:
  TensorView<const double, 2> router_;
  RouterOptions<double> options_;
  ForwardWeights shared_;
  std::optional<TensorView<const double, 2>> shared_gate_;  // [1, hidden]
  std::vector<ForwardWeights> experts_;
};

}  // namespace

Matrix<double> Unit::gathered(const Batch& batch, const PackedRow& row,
                              std::span<const std::uint32_t> slots, std::int64_t first,
                              std::int64_t width) const {
  Matrix<double> rows(static_cast<std::int64_t>(slots.size()), width);
  for (std::size_t i = 0; i < slots.size(); ++i)
    std::copy_n(kv_at(batch, row, slots[i]) + first, width,
                rows.data() + static_cast<std::int64_t>(i) * width);
  return rows;
}

Array<double, 1> norm_factors(const HybridConfig& config, const HybridWeights& weights,
                              const std::string& name) {
  const TensorView<const double, 1> weight = Named(weights, "").vector(name);
  Array<double, 1> factors(shape_of(weight));
  for (std::int64_t i = 0; i < weight.extent(0); ++i)
    factors(i) = weight(i) + (config.zero_centred_norms ? 1 : 0);
  return factors;
}

std::unique_ptr<Unit> make_unit(const HybridConfig& config, const HybridUnit& unit,
                                const HybridWeights& weights) {
  using Made = std::unique_ptr<Unit>;
  const Named named(weights, unit.at);
  return std::visit(
      Overloaded{
          [&](const AttentionUnit& u) -> Made {
            return std::make_unique<Attention>(config, u, unit, weights);
          },
          [&](const LatentUnit& u) -> Made { return std::make_unique<Latent>(u, unit, weights); },
          [&](const MambaUnit& u) -> Made { return mamba(config, u, named); },
          [&](const DeltaNetUnit& u) -> Made { return delta_net(config, u, named); },
          [&](const MlpUnit& u) -> Made { return std::make_unique<Mlp>(u, named); },
          [&](const ExpertsUnit& u) -> Made { return std::make_unique<Experts>(u, named); }},
      unit.kind);
}

}  // namespace lockstep::reference

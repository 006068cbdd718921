#include "cache_sim/numbers/torch/tensor_model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "cache_sim/numbers/torch/tensor_call.hpp"
#include "reference/base/require.hpp"
#include "reference/layers/rope.hpp"

namespace lockstep::cache_sim {

using at::Tensor;
using reference::AttentionUnit;
using reference::DeltaNetUnit;
using reference::ExpertsUnit;
using reference::FeedForward;
using reference::HybridConfig;
using reference::HybridUnit;
using reference::LatentUnit;
using reference::MambaUnit;
using reference::MlpUnit;

std::vector<std::int32_t> TensorRow::tree() const {
  std::vector<std::int32_t> all;
  for (std::int64_t i = 0; i < size(); ++i) {
    const bool draft = inputs() <= i && i < inputs() + drafts && !parents.empty();
    const std::int64_t parent =
        draft ? inputs() - 1 + parents[static_cast<std::size_t>(i - inputs())] : i - 1;
    all.push_back(static_cast<std::int32_t>(parent));
  }
  return all;
}

namespace {

constexpr std::int64_t kChunk = 64;  // of a prefill, as on a GPU and in its definition
constexpr double kLatentEps = 1e-6;  // of the norms inside latent attention

/// Pieces of rows that are one call of an operator.
struct Group {
  enum class Kind : std::uint8_t { prefill, decode, verification } kind;
  struct Piece {
    std::size_t row;
    std::int64_t first, size;  ///< tokens of the batch
  };
  std::vector<Piece> pieces{};
  std::int64_t padding = 0;  ///< rows of padding behind them
  Tensor tokens{};           ///< [tokens of the pieces] int64
  Tensor starts{};           ///< [pieces + 1] int32
  Tensor resumes{};          ///< of a prefill, [pieces] bool
  Tensor parents{};          ///< of a verification, [tokens] int32
};

/// The lists of slots that the calls of one unit read.
struct UnitLists {
  Tensor written{};              ///< KV slots of the batch's tokens, [T] int32; -1: none
  SeenSlots seen{};              ///< KV slots that they see
  std::vector<Tensor> states{};  ///< by call in order, the slots of its rows, int32
};

/// Calls of all rows side by side, then what happens before the next ones.
struct Round {
  std::vector<Group> groups{};
  std::vector<std::pair<std::size_t, reference::HybridTake>> takes{};  ///< after the calls
  std::vector<std::size_t> before_padding{};  ///< rows whose next call is their padding
};

struct PackedRow {
  const TensorRow* row;
  std::int64_t first;                            ///< token of the batch
  std::vector<std::vector<std::int64_t>> paths;  ///< by draft of a tree, the places that it sees

  /// The places that token i of the row sees, itself included, the last `most` alone.
  std::vector<std::int64_t> seen_by(std::int64_t i, std::int64_t most) const {
    const std::int64_t draft = i - row->inputs();
    if (0 <= draft && draft < row->drafts && !paths.empty()) {
      const std::vector<std::int64_t>& path = paths[static_cast<std::size_t>(draft)];
      return {path.end() - std::min(most, std::ssize(path)), path.end()};
    }
    const std::int64_t end = row->begin + i + 1;
    std::vector<std::int64_t> places(static_cast<std::size_t>(std::min(most, end)));
    std::iota(places.begin(), places.end(), end - std::ssize(places));
    return places;
  }
};

/// A batch. What a forward needs beside it, its tensors say: a forward over other tensors of the
/// same shapes is that of another batch.
struct Packed {
  std::vector<PackedRow> rows{};
  std::vector<std::int32_t> places{};
  std::vector<Round> rounds{};
  std::int64_t tokens = 0;
  Tensor embedded{};   ///< [T, D]
  Tensor positions{};  ///< [T] int32
  Tensor sampled{};    ///< [sampled] int64
  std::vector<UnitLists> units{};

  enum class List : std::uint8_t { tokens, lengths, slots };
  /// Calls act(tensor, list) for all of them, in an order that depends on shapes alone.
  template <class Act>
  void for_lists(const Act& act) {
    const auto one = [&](Tensor& tensor, List list) {
      if (tensor.defined()) act(tensor, list);
    };
    one(embedded, List::tokens);
    one(positions, List::lengths);
    one(sampled, List::tokens);
    for (UnitLists& unit : units) {
      one(unit.written, List::slots);
      one(unit.seen.table, List::slots);
      one(unit.seen.lengths, List::lengths);
      one(unit.seen.starts, List::slots);
      for (Tensor& slots : unit.states) one(slots, List::slots);
    }
    for (Round& round : rounds)
      for (Group& group : round.groups)
        for (Tensor* const list : {&group.tokens, &group.starts, &group.resumes, &group.parents})
          one(*list, List::slots);
  }
};

void pack(Packed& all, const TensorRow& row) {
  PackedRow packed{&row, all.tokens, {}};
  const std::vector<std::int32_t> tree = row.tree();
  for (const std::int32_t parent : tree)
    all.places.push_back(parent < 0
                             ? static_cast<std::int32_t>(row.begin)
                             : all.places[static_cast<std::size_t>(all.tokens + parent)] + 1);
  for (std::int64_t draft = 0; draft < row.drafts && !row.parents.empty(); ++draft) {
    const std::int64_t parent = row.parents[static_cast<std::size_t>(draft)];
    std::vector<std::int64_t> path;
    if (parent > 0) {
      path = packed.paths[static_cast<std::size_t>(parent - 1)];
    } else {
      path.resize(static_cast<std::size_t>(row.begin + row.inputs()));
      std::iota(path.begin(), path.end(), 0);
    }
    path.push_back(row.begin + row.inputs() + draft);
    packed.paths.push_back(std::move(path));
  }
  all.tokens += row.size();
  all.rows.push_back(std::move(packed));
}

/// The calls of a row: its end, or the ends of its pieces, in order.
void cut(Packed& all, std::size_t index) {
  const PackedRow& packed = all.rows[index];
  const TensorRow& row = *packed.row;
  std::size_t round = 0;
  std::int64_t done = 0;
  const auto at_round = [&]() -> Round& {
    if (all.rounds.size() <= round) all.rounds.resize(round + 1);
    return all.rounds[round];
  };
  const auto run_to = [&](std::int64_t end) {
    if (end == done) return;
    const auto kind = row.verifies                       ? Group::Kind::verification
                      : end - done == 1 && row.begin > 0 ? Group::Kind::decode
                                                         : Group::Kind::prefill;
    std::vector<Group>& groups = at_round().groups;
    auto group = std::ranges::find(groups, kind, &Group::kind);
    if (group == groups.end()) group = groups.insert(groups.end(), Group{.kind = kind});
    group->pieces.push_back({index, packed.first + done, end - done});
    done = end;
    ++round;
  };
  if (row.verifies) return run_to(row.size());
  for (const reference::HybridTake& take : row.takes) {
    if (take.after == row.begin) continue;  // copied ahead of all calls
    run_to(take.after - row.begin);
    all.rounds[round - 1].takes.emplace_back(index, take);
  }
  run_to(row.size() - row.padding);
  if (row.padding == 0) return;
  all.rounds[round - 1].before_padding.push_back(index);
  run_to(row.size());
}

Tensor int_list(const std::vector<std::int32_t>& values) {
  return at::tensor(values, at::kInt);
}

/// Fills in the tensors of a group.
void describe(Group& group, const Packed& all, bool pads) {
  std::vector<std::int64_t> tokens;
  std::vector<std::int32_t> starts{0}, parents, resumes;
  for (const Group::Piece& piece : group.pieces) {
    const TensorRow& row = *all.rows[piece.row].row;
    for (std::int64_t i = 0; i < piece.size; ++i) tokens.push_back(piece.first + i);
    starts.push_back(static_cast<std::int32_t>(tokens.size()));
    resumes.push_back(row.starts_from_nothing && piece.first == all.rows[piece.row].first ? 0 : 1);
    if (group.kind != Group::Kind::verification) continue;
    const std::vector<std::int32_t> tree = row.tree();
    parents.insert(parents.end(), tree.begin(), tree.end());
  }
  if (pads && group.kind == Group::Kind::decode)
    group.padding =
        static_cast<std::int64_t>(std::bit_ceil(group.pieces.size()) - group.pieces.size());
  group.tokens = at::tensor(tokens, at::kLong);
  group.starts = int_list(starts);
  group.resumes = int_list(resumes).to(at::kBool);
  if (!parents.empty()) group.parents = int_list(parents);
}

/// The KV slots of the batch's tokens in a layer.
Tensor written(const Packed& batch, std::size_t layer) {
  std::vector<std::int32_t> slots;
  for (const PackedRow& packed : batch.rows)
    for (std::int64_t i = 0; i < packed.row->size(); ++i) {
      const TensorRow& row = *packed.row;
      slots.push_back(row.writes_kv ? static_cast<std::int32_t>(row.kv_at(row.begin + i, layer))
                                    : row.no_slot);
    }
  return int_list(slots);
}

/// The slots that the batch's tokens see in a layer, at most `window` slots where it is not 0.
/// Tokens of a tree, and those that see a window, are told one by one, and all tokens where
/// `alone`.
SeenSlots seen_in(const Packed& batch, std::size_t layer, std::int64_t window, bool alone,
                  std::int64_t width) {
  std::vector<std::vector<std::int32_t>> all;
  std::vector<std::int32_t> lengths, starts;
  const std::int64_t most = window > 0 ? window : std::numeric_limits<std::int64_t>::max();
  const auto add = [&](const PackedRow& packed, std::int64_t first, std::int64_t count) {
    std::vector<std::int32_t>& seen = all.emplace_back();
    if (!packed.row->is_padding)
      for (const std::int64_t place : packed.seen_by(first + count - 1, most))
        seen.push_back(static_cast<std::int32_t>(packed.row->kv_at(place, layer)));
    width = std::max(width, static_cast<std::int64_t>(seen.size()));
    lengths.push_back(static_cast<std::int32_t>(seen.size()));
    starts.push_back(static_cast<std::int32_t>(packed.first + first));
  };
  for (const PackedRow& packed : batch.rows) {
    std::int64_t chain = packed.paths.empty() ? packed.row->size() : packed.row->inputs();
    if (window > 0 || alone) chain = 0;
    // Padding is apart, so that the other queries are those of a row without it.
    const std::int64_t own = std::min(chain, packed.row->size() - packed.row->padding);
    if (own > 0) add(packed, 0, own);
    for (std::int64_t i = own; i < packed.row->size(); ++i) add(packed, i, 1);
  }
  starts.push_back(static_cast<std::int32_t>(batch.tokens));
  const Tensor table = at::full({static_cast<std::int64_t>(all.size()), width}, -1, at::kInt);
  for (std::size_t i = 0; i < all.size(); ++i)
    std::ranges::copy(all[i],
                      table.data_ptr<std::int32_t>() + static_cast<std::int64_t>(i) * width);
  return {table, int_list(lengths), int_list(starts)};
}

/// The slots of the group's rows in the pools of a layer.
Tensor states_of(const Packed& batch, const Group& group, std::size_t layer) {
  std::vector<std::int32_t> slots;
  for (const Group::Piece& piece : group.pieces) {
    const TensorRow& row = *batch.rows[piece.row].row;
    slots.push_back(row.has_state ? static_cast<std::int32_t>(row.state_slot(row.state, layer))
                                  : row.no_slot);
  }
  slots.resize(slots.size() + static_cast<std::size_t>(group.padding), -1);
  return int_list(slots);
}

reference::Rope<double> rope_of(const AttentionUnit& u) {
  return reference::plain_rope(u.rotary_dims, u.rope_theta);
}
reference::Rope<double> rope_of(const LatentUnit& u) {
  return reference::yarn_rope<double>(u.rope_dim, u.rope_theta,
                                      {.factor = u.yarn_factor,
                                       .original_positions = u.yarn_positions,
                                       .mscale = 1.0,
                                       .mscale_all_dim = 1.0});
}

}  // namespace

struct TensorModel::Inside {
  HybridConfig config;
  reference::HybridWeights embedding{};
  std::shared_ptr<const TensorLayers> layers;
  at::ScalarType activations;
  std::map<std::string, Tensor> weights{};
  std::vector<PoolPart> parts{};
  std::map<std::int64_t, Tensor> frequencies{};  ///< of rotations, by unit
  BucketRules buckets{};
  bool has_states = false;

  const Tensor& weight(const std::string& name) const {
    const auto found = weights.find(name);
    require(found != weights.end(), "a model has all tensors of its configuration");
    return found->second;
  }
  std::size_t part(std::int64_t unit, PoolKind kind) const {
    const auto found = std::ranges::find_if(
        parts, [&](const PoolPart& one) { return one.unit == unit && one.kind == kind; });
    require(found != parts.end(), "a unit has its pools");
    return static_cast<std::size_t>(found - parts.begin());
  }
  void prepare(const reference::HybridWeights& drawn);
  void add_parts();
  /// The batch with its tensors on the CPU; tables of slots have `width` columns or more.
  Packed packed(std::span<const TensorRow* const> rows, bool pads, std::int64_t width) const;
  Tensor run(const Packed& batch, const TensorPools& pools, TensorResults& results) const;
};

namespace {

/// The forward of one batch.
class Run {
 public:
  using Inside = TensorModel::Inside;

  Run(const Inside& model, const TensorPools& pools, const Packed& batch, TensorResults& results)
      : model_(model), layers_(*model.layers), pools_(pools), batch_(batch), results_(results) {}

  void unit(std::int64_t index, Tensor& h) {
    index_ = index;
    const HybridUnit& unit = model_.config.units[static_cast<std::size_t>(index)];
    at_ = unit.at;
    const Tensor x = layers_.rms_norm(h, model_.weight(unit.norm), model_.config.eps);
    h = h + std::visit([&](const auto& kind) { return this->run(kind, x); }, unit.kind);
  }

 private:
  const Tensor& w(const std::string& name) const { return model_.weight(at_ + name); }
  const PoolPart& part(PoolKind kind) const { return model_.parts[model_.part(index_, kind)]; }
  const Tensor& pool(PoolKind kind) const { return pools_[model_.part(index_, kind)]; }
  const UnitLists& lists() const { return batch_.units[static_cast<std::size_t>(index_)]; }
  std::int64_t tokens() const { return batch_.tokens; }

  // --- Attention

  Tensor turned(const Tensor& heads, const AttentionUnit& u, const char* norm) const {
    Tensor x = heads;
    if (u.head_norms)
      x = layers_
              .rms_norm(x.reshape({-1, u.head_dim}), w(std::string(norm) + ".weight"),
                        model_.config.eps)
              .reshape(heads.sizes());
    if (u.rotary_dims == 0) return x.contiguous();
    return layers_.rope(x.contiguous(), batch_.positions, model_.frequencies.at(index_), 1, false);
  }

  Tensor run(const AttentionUnit& u, const Tensor& x) {
    const std::int64_t T = tokens(), d = u.head_dim;
    const Tensor q = layers_.product(x, w("q_proj.weight")).reshape({T, u.heads, -1});
    const Tensor k = layers_.product(x, w("k_proj.weight")).reshape({T, u.kv_heads, d});
    const Tensor v = layers_.product(x, w("v_proj.weight")).reshape({T, u.kv_heads, d});
    const Tensor kv = pool(PoolKind::kv);  // [slots, 2, HKV, d]
    layers_.store(kv.select(1, 0), turned(k, u, "k_norm"), lists().written);
    layers_.store(kv.select(1, 1), v.contiguous(), lists().written);
    Tensor out =
        layers_.attention(turned(q.narrow(-1, 0, d), u, "q_norm"), kv.select(1, 0), kv.select(1, 1),
                          lists().seen, 1 / std::sqrt(static_cast<double>(d)));
    out = out.reshape({T, -1});
    if (u.output_gate) out = layers_.sigmoid_gated(out, q.narrow(-1, d, d).reshape({T, -1}));
    return layers_.product(out, w("o_proj.weight"));
  }

  Tensor run(const LatentUnit& u, const Tensor& x) {
    const std::int64_t T = tokens(), H = u.heads;
    const reference::Rope<double> rope = rope_of(u);
    const auto rotated = [&](const Tensor& heads) {
      return layers_.rope(heads.contiguous(), batch_.positions, model_.frequencies.at(index_),
                          rope.magnitude, true);
    };
    const Tensor lora = layers_.rms_norm(layers_.product(x, w("q_a_proj.weight")),
                                         w("q_a_layernorm.weight"), kLatentEps);
    const Tensor q = layers_.product(lora, w("q_b_proj.weight")).reshape({T, H, -1});
    const Tensor kv = layers_.product(x, w("kv_a_proj_with_mqa.weight"));
    const Tensor latent = layers_.rms_norm(kv.narrow(-1, 0, u.latent).contiguous(),
                                           w("kv_a_layernorm.weight"), kLatentEps);
    const Tensor k_pe = rotated(kv.narrow(-1, u.latent, u.rope_dim).reshape({T, 1, -1}));
    const Tensor cache = pool(PoolKind::kv);  // [slots, 1, latent + rope]
    layers_.store(cache, at::cat({latent.unsqueeze(1), k_pe}, -1), lists().written);

    const Tensor kv_b = w("kv_b_proj.weight").reshape({H, u.nope_dim + u.value_dim, u.latent});
    const Tensor absorbed = layers_.products(
        q.narrow(-1, 0, u.nope_dim).transpose(0, 1).contiguous(),
        kv_b.narrow(1, 0, u.nope_dim).transpose(1, 2).contiguous());  // [H, T, latent]
    const Tensor q_pe = rotated(q.narrow(-1, u.nope_dim, u.rope_dim));
    const double scale =
        rope.softmax_factor / std::sqrt(static_cast<double>(u.nope_dim + u.rope_dim));
    const Tensor out =
        called("mla_decode", {{"q", at::cat({absorbed.transpose(0, 1), q_pe}, -1).unsqueeze(1)},
                              {"kv_cache", cache},
                              {"block_table", lists().seen.table},
                              {"seq_lens", lists().seen.lengths},
                              {"softmax_scale", scale},
                              {"parts", 1},
                              {"value_dim", u.latent}});  // [T, 1, H, latent]
    const Tensor values =
        layers_.products(out.squeeze(1).transpose(0, 1).contiguous(),
                         kv_b.narrow(1, u.nope_dim, u.value_dim).contiguous());  // [H, T, dv]
    return layers_.product(values.transpose(0, 1).reshape({T, -1}), w("o_proj.weight"));
  }

  // --- Units with states

  /// The group's tokens of x [T, ...], and its padding.
  Tensor taken(const Tensor& x, const Group& group) const {
    const Tensor own = x.index_select(0, group.tokens);
    if (group.padding == 0) return own;
    std::vector<std::int64_t> shape = own.sizes().vec();
    shape[0] = group.padding;
    return at::cat({own, at::full(shape, std::numeric_limits<double>::quiet_NaN(), own.options())});
  }
  /// Arguments that all operators of a group share.
  Arguments rows_of(const Group& group, const Tensor& slots) const {
    Arguments arguments{{"state_indices", slots}};
    if (group.kind != Group::Kind::decode) arguments.emplace("query_start_loc", group.starts);
    if (group.kind == Group::Kind::prefill) arguments.emplace("has_initial_state", group.resumes);
    if (group.kind == Group::Kind::verification) arguments.emplace("parents", group.parents);
    return arguments;
  }
  /// An empty tensor for a verification's states; the rows' shares of it become results.
  Tensor snapshots(const Group& group, PoolKind kind, Arguments& arguments) {
    if (group.kind != Group::Kind::verification) return {};
    std::vector<std::int64_t> shape = part(kind).shape;
    shape.insert(shape.begin(), group.tokens.size(0));
    const Tensor all =
        at::full(shape, std::numeric_limits<double>::quiet_NaN(), pool(kind).options());
    arguments.emplace("snapshots", all);
    std::int64_t first = 0;
    for (const Group::Piece& piece : group.pieces) {
      std::vector<Tensor>& own = results_.states_after[piece.row];
      own.resize(model_.parts.size());
      own[model_.part(index_, kind)] = all.narrow(0, first, piece.size);
      first += piece.size;
    }
    return all;
  }

  /// Channels [n, D] of the group's tokens behind the convolution.
  Tensor convolved(const Tensor& channels, const Group& group, const Tensor& slots,
                   const std::optional<Tensor>& bias) {
    Arguments arguments = rows_of(group, slots);
    arguments.emplace("x", channels);
    arguments.emplace("weight", w("conv1d.weight"));
    arguments.emplace("bias", bias);
    arguments.emplace("conv_state", pool(PoolKind::conv));
    arguments.emplace("activation", "silu");
    snapshots(group, PoolKind::conv, arguments);
    return called(group.kind == Group::Kind::prefill ? "causal_conv1d" : "causal_conv1d_update",
                  arguments);
  }

  struct Saved {
    std::int64_t slot;
    PoolKind kind;
    Tensor state;
  };
  void save(std::vector<Saved>& saved, const TensorRow& row, PoolKind kind) const {
    const std::int64_t slot = row.state_slot(row.state, part(kind).layer);
    saved.push_back({slot, kind, pool(kind).select(0, slot).clone()});
  }

  /// Runs mix(group, slots), which gives [n, D], over all groups, and moves states between them.
  template <class Mix>
  Tensor recurrent(std::int64_t channels, const Tensor& x, const Mix& mix) {
    Tensor out = at::empty({tokens(), channels}, x.options());
    std::vector<Saved> saved;  // restored in reverse order
    for (const PackedRow& packed : batch_.rows) {
      const TensorRow& row = *packed.row;
      if (!row.has_state || row.verifies) continue;
      if (!row.keeps_recurrent) save(saved, row, PoolKind::recurrent);
      if (!row.keeps_conv) save(saved, row, PoolKind::conv);
      for (const reference::HybridTake& take : row.takes)
        if (take.after == row.begin) copy_take(row, take);
    }
    auto slots = lists().states.begin();
    for (const Round& round : batch_.rounds) {
      for (const Group& group : round.groups) {
        const Tensor y = mix(group, *slots++);
        out.index_copy_(0, group.tokens, y.narrow(0, 0, group.tokens.size(0)));
      }
      for (const auto& [index, take] : round.takes) copy_take(*batch_.rows[index].row, take);
      for (const std::size_t index : round.before_padding)
        for (const PoolKind kind : {PoolKind::recurrent, PoolKind::conv})
          save(saved, *batch_.rows[index].row, kind);
    }
    for (auto one = saved.rbegin(); one != saved.rend(); ++one)
      pool(one->kind).select(0, one->slot).copy_(one->state);
    return out;
  }

  void copy_take(const TensorRow& row, const reference::HybridTake& take) const {
    for (const PoolKind kind : {PoolKind::recurrent, PoolKind::conv}) {
      if (!(kind == PoolKind::conv ? take.conv : take.recurrent)) continue;
      const std::size_t layer = part(kind).layer;
      const auto from = static_cast<std::int32_t>(row.state_slot(row.state, layer));
      const auto to = static_cast<std::int32_t>(row.state_slot(take.slot, layer));
      if (from == to) continue;
      call("state_copy", {{"state", pool(kind).unsqueeze(0)},
                          {"source", int_list({from}).to(layers_.device())},
                          {"target", int_list({to}).to(layers_.device())}});
    }
  }

  Tensor run(const MambaUnit& u, const Tensor& x) {
    const std::int64_t inner = u.heads * u.head_dim, bc = u.groups * u.state;
    const std::int64_t channels = inner + 2 * bc;
    const Tensor in = layers_.product(x, w("in_proj.weight"));
    const Tensor y = recurrent(inner, x, [&](const Group& group, const Tensor& slots) {
      const Tensor own = taken(in, group);
      const std::int64_t n = own.size(0);
      const Tensor mixed =
          convolved(own.narrow(1, inner, channels).contiguous(), group, slots, w("conv1d.bias"));
      Arguments arguments = rows_of(group, slots);
      const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
        return mixed.narrow(1, first, count * width).unflatten(1, {count, width});
      };
      arguments.emplace("state", pool(PoolKind::recurrent));
      arguments.emplace("x", heads(0, u.heads, u.head_dim));
      arguments.emplace("dt", own.narrow(1, inner + channels, u.heads));
      arguments.emplace("A", w("A"));
      arguments.emplace("B", heads(inner, u.groups, u.state));
      arguments.emplace("C", heads(inner + bc, u.groups, u.state));
      arguments.emplace("D", w("D"));
      arguments.emplace("dt_bias", w("dt_bias"));
      arguments.emplace("dt_softplus", true);
      if (group.kind == Group::Kind::prefill) arguments.emplace("chunk_size", kChunk);
      snapshots(group, PoolKind::recurrent, arguments);
      return called(group.kind == Group::Kind::prefill ? "ssd_prefill" : "selective_state_update",
                    arguments)
          .reshape({n, inner});
    });
    const Tensor normed =
        layers_.gated_rms_norm(y, in.narrow(1, 0, inner).contiguous(), w("norm.weight"),
                               model_.config.eps, true, u.groups);
    return layers_.product(normed, w("out_proj.weight"));
  }

  Tensor run(const DeltaNetUnit& u, const Tensor& x) {
    const std::int64_t T = tokens(), H = u.key_heads, HV = u.value_heads, r = HV / H;
    const std::int64_t keys = H * u.key_dim, values = HV * u.value_dim;
    const Tensor qkvz = layers_.product(x, w("in_proj_qkvz.weight")).reshape({T, H, -1});
    const Tensor ba = layers_.product(x, w("in_proj_ba.weight")).reshape({T, H, 2 * r});
    const auto columns = [&](const Tensor& of, std::int64_t first, std::int64_t count) {
      return of.narrow(-1, first, count).reshape({T, -1});
    };
    const Tensor qkv = at::cat({columns(qkvz, 0, u.key_dim), columns(qkvz, u.key_dim, u.key_dim),
                                columns(qkvz, 2 * u.key_dim, r * u.value_dim)},
                               1);
    const Tensor z = columns(qkvz, 2 * u.key_dim + r * u.value_dim, r * u.value_dim);
    const Tensor b = columns(ba, 0, r), a = columns(ba, r, r);
    const Tensor y = recurrent(values, x, [&](const Group& group, const Tensor& slots) {
      const Tensor mixed = convolved(taken(qkv, group), group, slots, {});
      const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
        return mixed.narrow(1, first, count * width).unflatten(1, {count, width});
      };
      Arguments arguments = rows_of(group, slots);
      arguments.emplace("q", heads(0, H, u.key_dim));
      arguments.emplace("k", heads(keys, H, u.key_dim));
      arguments.emplace("v", heads(2 * keys, HV, u.value_dim));
      arguments.emplace("g", taken(a, group));
      arguments.emplace("beta", taken(b, group));
      arguments.emplace("state", pool(PoolKind::recurrent));
      arguments.emplace("A_log", w("A_log"));
      arguments.emplace("dt_bias", w("dt_bias"));
      arguments.emplace("use_qk_l2norm", true);
      const bool prefills = group.kind == Group::Kind::prefill;
      if (prefills) arguments.emplace("whole_rows", true);
      snapshots(group, PoolKind::recurrent, arguments);
      return called(prefills ? "gated_delta_rule_prefill" : "gated_delta_rule_update", arguments)
          .reshape({-1, values});
    });
    const Tensor normed = layers_.gated_rms_norm(y.reshape({T * HV, -1}), z.reshape({T * HV, -1}),
                                                 w("norm.weight"), model_.config.eps, false, 1);
    return layers_.product(normed.reshape({T, values}), w("out_proj.weight"));
  }

  // --- Feed-forward units

  Tensor mlp(const std::string& at, FeedForward form, const Tensor& x) const {
    const Tensor up = layers_.product(x, w(at + "up_proj.weight"));
    const Tensor inner = form == FeedForward::squared_relu
                             ? layers_.squared_relu(up)
                             : layers_.swiglu(layers_.product(x, w(at + "gate_proj.weight")), up);
    return layers_.product(inner, w(at + "down_proj.weight"));
  }
  Tensor run(const MlpUnit& u, const Tensor& x) const { return mlp("", u.form, x); }

  Tensor run(const ExpertsUnit& u, const Tensor& x) const {
    const std::optional<Tensor> bias =
        u.sigmoid_scores ? std::optional(w("gate.e_score_correction_bias")) : std::nullopt;
    const Routes routes = layers_.route(layers_.logits(x, w("gate.weight")), bias, u);
    Tensor shared = mlp(shared_expert_name(u), u.form, x);
    if (u.shared_gate)
      shared = layers_.sigmoid_gated(shared, layers_.product(x, w("shared_expert_gate.weight")));
    const bool gated = u.form == FeedForward::swiglu;
    return shared +
           layers_.experts(
               x, routes,
               {w(gated ? "experts.gate_up_proj" : "experts.up_proj"), w("experts.down_proj")}, u);
  }

  const Inside& model_;
  const TensorLayers& layers_;
  const TensorPools& pools_;
  const Packed& batch_;
  TensorResults& results_;
  std::int64_t index_ = 0;
  std::string at_;
};

/// The batch's tensors on the device.
Packed moved(Packed batch, const at::Device& device) {
  batch.for_lists([&](Tensor& list, Packed::List) { list = list.to(device); });
  return batch;
}

/// A row of one token behind others that keeps its state: what a captured bucket runs.
bool is_plain_decode(const TensorRow& row) {
  return row.size() == 1 && row.begin > 0 && !row.verifies && row.takes.empty() && row.writes_kv &&
         row.keeps_recurrent && row.keeps_conv;
}

/// Columns of the tables of slots: a power of two, so that rows of many lengths share a bucket.
std::int64_t table_width(std::span<const TensorRow* const> rows) {
  std::int64_t longest = 16;
  for (const TensorRow* const row : rows) longest = std::max(longest, row->begin + row->size());
  return room_for(longest);
}

}  // namespace

/// Norms and numbers per head or channel stay in float32.
void TensorModel::Inside::prepare(const reference::HybridWeights& drawn) {
  embedding.seed = drawn.seed;
  embedding.embedding_scale = drawn.embedding_scale;
  embedding.embedding = drawn.embedding;
  const auto add = [&](const std::string& name, const Tensor& values, bool matrix) {
    weights[name] = values.to(matrix ? activations : at::kFloat).to(layers->device()).contiguous();
  };
  for (const auto& [name, tensor] : drawn.tensors) {
    Tensor values = at::empty(tensor.shape, at::kDouble);
    std::ranges::copy(tensor.values, values.data_ptr<double>());
    if (name.ends_with("conv1d.weight")) values = values.squeeze(1);
    add(name, values, values.dim() > 1);
    if (name.ends_with("A_log"))
      add(name.substr(0, name.size() - 4), values.to(at::kFloat).exp().neg(), false);
  }
  const auto add_frequencies = [&](std::size_t unit, const reference::Rope<double>& rope) {
    const std::vector<float> rates(rope.frequencies.begin(), rope.frequencies.end());
    frequencies[static_cast<std::int64_t>(unit)] = at::tensor(rates).to(layers->device());
  };
  for (std::size_t i = 0; i < config.units.size(); ++i) {
    if (const auto* const u = std::get_if<AttentionUnit>(&config.units[i].kind))
      add_frequencies(i, rope_of(*u));
    if (const auto* const u = std::get_if<LatentUnit>(&config.units[i].kind))
      add_frequencies(i, rope_of(*u));
  }
  if (!config.zero_centred_norms) return;
  const auto centre = [&](const std::string& name) {
    if (const auto found = weights.find(name); found != weights.end())
      found->second = found->second + 1;
  };
  centre(config.last_norm);
  for (const HybridUnit& unit : config.units) {
    centre(unit.norm);
    centre(unit.at + "q_norm.weight");
    centre(unit.at + "k_norm.weight");
  }
}

void TensorModel::Inside::add_parts() {
  std::size_t kv = 0, states = 0;
  for (std::size_t i = 0; i < config.units.size(); ++i) {
    const auto unit = static_cast<std::int64_t>(i);
    const auto add_state = [&](std::vector<std::int64_t> state, std::int64_t channels,
                               std::int64_t width) {
      has_states = true;
      parts.push_back({unit, states, PoolKind::recurrent, std::move(state), at::kFloat});
      parts.push_back({unit, states++, PoolKind::conv, {channels, width - 1}, activations});
    };
    if (const auto* const u = std::get_if<AttentionUnit>(&config.units[i].kind))
      parts.push_back({unit, kv++, PoolKind::kv, {2, u->kv_heads, u->head_dim}, activations});
    if (const auto* const u = std::get_if<LatentUnit>(&config.units[i].kind))
      parts.push_back({unit, kv++, PoolKind::kv, {1, u->latent + u->rope_dim}, activations});
    if (const auto* const u = std::get_if<MambaUnit>(&config.units[i].kind))
      add_state({u->heads, u->head_dim, u->state},
                u->heads * u->head_dim + 2 * u->groups * u->state, u->width);
    if (const auto* const u = std::get_if<DeltaNetUnit>(&config.units[i].kind))
      add_state({u->value_heads, u->value_dim, u->key_dim},
                2 * u->key_heads * u->key_dim + u->value_heads * u->value_dim, u->width);
  }
}

TensorModel::TensorModel(HybridConfig config, const reference::HybridWeights& weights,
                         std::shared_ptr<const TensorLayers> layers, at::ScalarType activations,
                         BucketRules buckets) {
  auto inside = std::make_unique<Inside>(Inside{.config = std::move(config),
                                                .layers = std::move(layers),
                                                .activations = activations,
                                                .buckets = buckets});
  inside->prepare(weights);
  inside->add_parts();
  inside_ = std::move(inside);
}
TensorModel::~TensorModel() = default;

const HybridConfig& TensorModel::config() const {
  return inside_->config;
}
const std::vector<PoolPart>& TensorModel::parts() const {
  return inside_->parts;
}
at::Device TensorModel::device() const {
  return inside_->layers->device();
}
at::ScalarType TensorModel::activations() const {
  return inside_->activations;
}
bool TensorModel::has_states() const {
  return inside_->has_states;
}

TensorPools TensorModel::pools(std::int64_t states, std::int64_t kv) const {
  TensorPools all;
  for (const PoolPart& part : parts()) {
    std::vector<std::int64_t> shape = part.shape;
    shape.insert(shape.begin(), part.kind == PoolKind::kv ? kv : states);
    all.push_back(at::full(shape, std::numeric_limits<double>::quiet_NaN(),
                           at::TensorOptions(part.type).device(device())));
  }
  return all;
}

Packed TensorModel::Inside::packed(std::span<const TensorRow* const> rows, bool pads,
                                   std::int64_t width) const {
  Packed batch;
  for (const TensorRow* const row : rows) pack(batch, *row);
  for (std::size_t i = 0; i < rows.size(); ++i) cut(batch, i);
  for (Round& round : batch.rounds)
    for (Group& group : round.groups) describe(group, batch, pads);
  batch.units.resize(config.units.size());
  for (const PoolPart& part : parts) {
    UnitLists& lists = batch.units[static_cast<std::size_t>(part.unit)];
    if (part.kind == PoolKind::kv) {
      const auto& kind = config.units[static_cast<std::size_t>(part.unit)].kind;
      const auto* const attention = std::get_if<AttentionUnit>(&kind);
      lists.written = written(batch, part.layer);
      lists.seen = seen_in(batch, part.layer, attention == nullptr ? 0 : attention->window,
                           attention == nullptr, width);
    } else if (part.kind == PoolKind::conv) {
      for (const Round& round : batch.rounds)
        for (const Group& group : round.groups)
          lists.states.push_back(states_of(batch, group, part.layer));
    }
  }
  const Tensor embedded = at::full({batch.tokens, config.hidden},
                                   std::numeric_limits<double>::quiet_NaN(), at::kDouble);
  std::vector<std::int64_t> sampled;
  for (const PackedRow& packed : batch.rows) {
    double* next = embedded.data_ptr<double>() + packed.first * config.hidden;
    for (const std::uint64_t token : packed.row->tokens) {
      if (!packed.row->is_padding)
        reference::embed(embedding, token, {next, static_cast<std::size_t>(config.hidden)});
      next += config.hidden;
    }
    const std::int64_t end = packed.first + packed.row->size() - packed.row->padding;
    for (std::int64_t t = end - packed.row->sampled(); t < end; ++t) sampled.push_back(t);
  }
  batch.embedded = embedded.to(activations);
  batch.positions = int_list(batch.places);
  batch.sampled = at::tensor(sampled, at::kLong);
  return batch;
}

/// The logits, on the device.
Tensor TensorModel::Inside::run(const Packed& batch, const TensorPools& pools,
                                TensorResults& results) const {
  results.states_after.resize(batch.rows.size());
  Tensor h = batch.embedded;
  Run run(*this, pools, batch, results);
  for (std::size_t i = 0; i < config.units.size(); ++i) run.unit(static_cast<std::int64_t>(i), h);
  const Tensor last =
      layers->rms_norm(h.index_select(0, batch.sampled), weight(config.last_norm), config.eps);
  return layers->logits(last, weight("lm_head.weight"));
}

TensorResults TensorModel::forward(std::span<const TensorRow* const> rows, const TensorPools& pools,
                                   bool pads) const {
  TensorResults results;
  results.logits =
      inside_->run(moved(inside_->packed(rows, pads, 1), device()), pools, results).to(at::kCPU);
  return results;
}

// --- Buckets

/// A forward of plain decodes over tensors of its own, captured.
struct TensorMemory::Bucket {
  Packed batch;
  Tensor logits;
  std::function<void()> replay;
};

TensorMemory::TensorMemory(TensorPools own) : pools(std::move(own)) {}
TensorMemory::~TensorMemory() = default;

bool TensorModel::fits_bucket(std::span<const TensorRow* const> rows) {
  return std::ranges::all_of(rows, [](const TensorRow* row) { return is_plain_decode(*row); });
}

TensorResults TensorModel::decode(std::span<const TensorRow* const> rows,
                                  TensorMemory& memory) const {
  const BucketRules& rules = inside_->buckets;
  const TensorRow nobody{.tokens = {0},
                         .begin = 1,
                         .kv = {0, 0},
                         .writes_kv = false,
                         .has_state = false,
                         .is_padding = true};
  TensorRow first_nobody = nobody;
  first_nobody.no_slot = rules.padding_slot;
  const std::size_t size = std::bit_ceil(rows.size());
  const std::int64_t width = table_width(rows);
  std::vector<const TensorRow*> padded(rows.begin(), rows.end());
  if (padded.size() < size) padded.push_back(&first_nobody);
  padded.resize(size, &nobody);
  Packed live = inside_->packed(padded, false, width);

  std::shared_ptr<TensorMemory::Bucket>& bucket = memory.buckets[{size, width}];
  const bool is_new = bucket == nullptr;
  if (is_new) {
    bucket = std::make_shared<TensorMemory::Bucket>();
    const std::vector<const TensorRow*> nobodies(size, &nobody);
    bucket->batch = moved(
        inside_->packed(rules.warms_up_on_padding ? nobodies : padded, false, width), device());
    bucket->batch.rows.clear();  // they are gone when it runs again
    const auto work = [this, &memory, own = bucket.get()] {
      TensorResults none;
      own->logits = inside_->run(own->batch, memory.pools, none);
    };
    work();
    bucket->replay = inside_->layers->captured(work);
  }
  std::vector<Tensor> lists;
  live.for_lists([&](const Tensor& list, Packed::List) { lists.push_back(list); });
  auto next = lists.begin();
  bucket->batch.for_lists([&](const Tensor& list, Packed::List kind) {
    const bool refreshes =
        kind == Packed::List::tokens ||
        (rules.refreshes_lists && (kind == Packed::List::slots || rules.refreshes_lengths));
    if (is_new || refreshes) list.copy_(*next);
    ++next;
  });
  bucket->replay();
  ++memory.replays;
  TensorResults results;
  results.logits = bucket->logits.narrow(0, 0, static_cast<std::int64_t>(rows.size())).to(at::kCPU);
  results.states_after.resize(rows.size());
  return results;
}

}  // namespace lockstep::cache_sim

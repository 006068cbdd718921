#include "reference/models/hybrid/hybrid_model.hpp"

#include <algorithm>

#include "reference/layers/rms_norm.hpp"
#include "reference/models/hybrid/hybrid_units.hpp"
#include "reference/recurrent/mamba_mixer.hpp"

namespace lockstep::reference {

struct HybridModel::Inside {
  HybridConfig config;
  HybridWeights weights;
  std::vector<std::unique_ptr<Unit>> units{};
  std::vector<Array<double, 1>> norms{};        ///< by unit, then the last one
  TensorView<const double, 2> head{};           // [vocabulary, hidden]
  std::vector<Array<double, 1>> input_norms{};  ///< of a draft module: embedding's, hidden's
  TensorView<const double, 2> projection{};     // [hidden, 2 hidden]
  std::size_t kv_size = 0, recurrent_size = 0, state_size = 0;
  std::size_t kv_layers = 0, state_layers = 0;  ///< units that have KV, or a state
  std::vector<HybridPart> parts{};
  std::vector<HybridPart> state_parts{};

  /// Calls act(part, slot) for the parts of the row's state.
  template <class Act>
  void for_states(const HybridRow& row, const Act& act) const {
    for (const HybridPart& part : state_parts)
      act(part, row.state + PackedRow::distance(row.state_layers, part.layer));
  }

  /// Makes the input of a draft module of the embeddings in h, [T, hidden].
  void join(const Batch& batch, Array<double, 2>& h) const {
    const std::int64_t T = h.extent(0), D = config.hidden;
    Array<double, 2> both(Shape<2>{T, 2 * D});
    const auto half = [&](std::int64_t first, std::int64_t rows, std::int64_t column) {
      return make_view(&both(first, column), Shape<2>{rows, D}, Shape<2>{2 * D, 1});
    };
    rms_norm<double>(h, input_norms[0], config.eps, half(0, T, 0));
    for (const PackedRow& row : batch.rows)
      rms_norm<double>(make_view(row.row->hidden, Shape<2>{row.range.size(), D}), input_norms[1],
                       config.eps, half(row.range.begin, row.range.size(), D));
    mapped(h.view()) = mapped(projected<double>(both, projection).view());
  }
};

namespace {

/// Of a verification, by token of the row: the token that it follows, -1 for the first one.
std::vector<std::int32_t> tree_of(const HybridRow& row) {
  const std::int64_t inputs = row.inputs();
  require(row.parents.empty() || inputs > 0, "a tree of drafts grows from a token of its row");
  std::vector<std::int32_t> parents;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(row.tokens.size()); ++i) {
    const bool draft = inputs <= i && i < inputs + row.drafts && !row.parents.empty();
    const std::int64_t parent =
        draft ? inputs - 1 + row.parents[static_cast<std::size_t>(i - inputs)] : i - 1;
    parents.push_back(static_cast<std::int32_t>(parent));
  }
  return parents;
}

void check_row(const HybridRow& row) {
  require(!row.tokens.empty() && row.begin >= 0, "a row has tokens");
  require(row.kv.size() >= static_cast<std::size_t>(row.begin) + row.tokens.size(),
          "a row has a KV slot for each of its places");
  require(row.drafts == 0 || row.states_after != nullptr, "drafts are verified");
  require(0 <= row.padding && row.padding < static_cast<std::int64_t>(row.tokens.size()),
          "a row has tokens before its padding");
  require(row.takes.empty() || row.states_after == nullptr, "a verification takes no states");
  require(row.parents.empty() || row.parents.size() == static_cast<std::size_t>(row.drafts),
          "each draft has a parent");
  std::int64_t last = row.begin;
  for (const HybridTake& take : row.takes) {
    require(
        last <= take.after &&
            take.after <= row.begin + static_cast<std::int64_t>(row.tokens.size()) - row.padding,
        "states are taken in order and within the row");
    last = take.after;
  }
}

/// The row at token `first` of the batch; adds the positions of its tokens.
PackedRow packed(const HybridRow& row, std::int64_t first, std::vector<std::int32_t>& positions) {
  check_row(row);
  PackedRow result{&row, {first, first + static_cast<std::int64_t>(row.tokens.size())}, {}, {}, {}};
  if (row.states_after != nullptr) result.parents = tree_of(row);
  for (std::int64_t i = 0; i < result.range.size(); ++i) {
    const std::int32_t parent = result.parents.empty()
                                    ? static_cast<std::int32_t>(i) - 1
                                    : result.parents[static_cast<std::size_t>(i)];
    positions.push_back(parent < 0 ? static_cast<std::int32_t>(row.position.value_or(row.begin))
                                   : positions[static_cast<std::size_t>(first + parent)] + 1);
  }
  const std::int64_t inputs = row.inputs();
  for (std::int64_t draft = 0; draft < row.drafts && !row.parents.empty(); ++draft) {
    const std::int64_t parent = row.parents[static_cast<std::size_t>(draft)];
    const auto seen =
        parent == 0
            ? row.kv.first(static_cast<std::size_t>(row.begin + inputs))
            : std::span<const std::uint32_t>(result.paths[static_cast<std::size_t>(parent - 1)]);
    std::vector<std::uint32_t> path(seen.begin(), seen.end());
    path.push_back(row.kv[static_cast<std::size_t>(row.begin + inputs + draft)]);
    result.paths.push_back(std::move(path));
  }
  return result;
}

/// Writes x, [T, hidden], for the rows that keep what the units with a state are given.
void leave_inputs(const Inputs& x, const Batch& batch, std::size_t layer, std::size_t layers) {
  const auto hidden = static_cast<std::size_t>(x.extent(1));
  for (const PackedRow& row : batch.rows)
    for (std::int64_t i = 0; row.row->state_inputs != nullptr && i < row.range.size(); ++i)
      std::copy_n(&x(row.range.begin + i, 0), hidden,
                  row.row->state_inputs + (static_cast<std::size_t>(i) * layers + layer) * hidden);
}

}  // namespace

HybridModel::HybridModel(HybridConfig config, HybridWeights weights) {
  auto inside = std::make_unique<Inside>(Inside{std::move(config), std::move(weights)});
  const HybridConfig& c = inside->config;
  const auto matrix = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    return make_view<const double>(inside->weights.tensors.at(name).values.data(),
                                   Shape<2>{rows, columns});
  };
  inside->head = matrix("lm_head.weight", c.vocabulary, c.hidden);
  if (c.draft) {
    for (const std::string& name : {c.draft->embedding_norm, c.draft->hidden_norm})
      inside->input_norms.push_back(norm_factors(c, inside->weights, name));
    inside->projection = matrix(c.draft->projection, c.hidden, 2 * c.hidden);
  }
  for (const HybridUnit& unit : c.units) {
    inside->units.push_back(make_unit(c, unit, inside->weights));
    inside->norms.push_back(norm_factors(c, inside->weights, unit.norm));
    inside->recurrent_size += inside->units.back()->recurrent_size();
  }
  inside->norms.push_back(norm_factors(c, inside->weights, c.last_norm));
  std::size_t recurrent = 0, conv = inside->recurrent_size, state_layers = 0;
  for (std::size_t i = 0; i < inside->units.size(); ++i) {
    Unit& unit = *inside->units[i];
    unit.kv_first = inside->kv_size;
    unit.recurrent_first = recurrent;
    unit.conv_first = conv;
    unit.layer = unit.kv_size() > 0     ? inside->kv_layers++
                 : unit.conv_size() > 0 ? state_layers++
                                        : 0;
    inside->kv_size += unit.kv_size();
    recurrent += unit.recurrent_size();
    conv += unit.conv_size();
    const auto part = [&](const char* name, std::size_t first, std::size_t size) {
      if (size > 0)
        inside->parts.push_back({static_cast<std::int64_t>(i), unit.layer, name, first, size});
    };
    part("recurrent", unit.recurrent_first, unit.recurrent_size());
    part("conv", unit.conv_first, unit.conv_size());
    part("KV", unit.kv_first, unit.kv_size());
  }
  inside->state_size = conv;
  inside->state_layers = state_layers;
  for (const HybridPart& part : inside->parts)
    if (std::string_view(part.name) != "KV") inside->state_parts.push_back(part);
  inside_ = std::move(inside);
}

HybridModel::~HybridModel() = default;

const HybridConfig& HybridModel::config() const {
  return inside_->config;
}
const HybridWeights& HybridModel::weights() const {
  return inside_->weights;
}
std::size_t HybridModel::kv_size() const {
  return inside_->kv_size;
}
std::size_t HybridModel::recurrent_size() const {
  return inside_->recurrent_size;
}
std::size_t HybridModel::state_input_size() const {
  return inside_->state_layers * static_cast<std::size_t>(inside_->config.hidden);
}
std::size_t HybridModel::state_size() const {
  return inside_->state_size;
}
const std::vector<HybridPart>& HybridModel::parts() const {
  return inside_->parts;
}

void HybridModel::replay(std::span<const double> inputs, std::span<double> state) const {
  require(inputs.size() == state_input_size() && state.size() == state_size(),
          "a token's inputs and a state have the model's sizes");
  const std::int64_t hidden = inside_->config.hidden;
  for (const std::unique_ptr<Unit>& unit : inside_->units)
    if (unit->conv_size() > 0)
      unit->replay(make_view(inputs.data() + unit->layer * static_cast<std::size_t>(hidden),
                             Shape<2>{1, hidden}),
                   state);
}

void HybridModel::forward(std::span<const HybridRow> rows, const SlotPool& kv,
                          const SlotPool& states, std::span<double> logits) const {
  const Inside& model = *inside_;
  const std::size_t size = model.state_size;
  require(kv.size == model.kv_size && states.size == size, "pools have slots of the model's size");
  Batch batch{{}, {}, kv, states};
  std::int64_t T = 0;
  std::size_t sampled = 0;
  for (const HybridRow& row : rows) {
    require((row.hidden != nullptr) == model.config.draft.has_value(),
            "rows of a draft module have hidden states, and no others");
    require(row.kv_places.empty() || row.kv_places.size() == model.kv_layers * row.kv.size(),
            "a row names all places of its KV");
    batch.rows.push_back(packed(row, T, batch.positions));
    T = batch.rows.back().range.end;
    sampled += row.sampled();
  }
  require(logits.size() == sampled * vocabulary(), "every sampled token has its logits");

  std::vector<double> working(rows.size() * size);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    batch.rows[i].state = std::span(working).subspan(i * size, size);
    model.for_states(rows[i], [&](const HybridPart& part, std::uint32_t slot) {
      std::copy_n(states.at(slot) + part.first, part.size, batch.rows[i].state.data() + part.first);
    });
  }
  Array<double, 2> h(Shape<2>{T, model.config.hidden}), x(h.shape());
  for (const PackedRow& row : batch.rows)
    for (std::int64_t i = 0; i < row.range.size(); ++i)
      embed(model.weights, row.row->tokens[static_cast<std::size_t>(i)],
            {&h(row.range.begin + i, 0), static_cast<std::size_t>(model.config.hidden)});
  if (model.config.draft) model.join(batch, h);
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    rms_norm<double>(h, model.norms[i], model.config.eps, x);
    if (model.units[i]->conv_size() > 0)
      leave_inputs(x, batch, model.units[i]->layer, model.state_layers);
    model.units[i]->add(x, batch, h);
  }

  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].states_after != nullptr) continue;
    model.for_states(rows[i], [&](const HybridPart& part, std::uint32_t slot) {
      if (part.first < model.recurrent_size ? rows[i].keeps_recurrent : rows[i].keeps_conv)
        std::copy_n(batch.rows[i].state.data() + part.first, part.size,
                    states.at(slot) + part.first);
    });
  }
  double* out = logits.data();
  for (const PackedRow& row : batch.rows) {
    const auto count = static_cast<std::int64_t>(row.row->sampled());
    const std::int64_t end = row.range.end - row.row->padding, first = end - count;
    const bool all = row.row->hidden_after != nullptr;
    const std::int64_t from = all ? row.range.begin : first, to = all ? row.range.end : end;
    rms_norm<double>(cut(h.view(), from, to), model.norms.back(), model.config.eps,
                     cut(x.view(), from, to));
    if (all) std::copy_n(&x(from, 0), (to - from) * model.config.hidden, row.row->hidden_after);
    mapped(make_view(out, Shape<2>{count, model.config.vocabulary})) =
        mapped(projected<double>(cut(x.view(), first, end), model.head).view());
    out += count * model.config.vocabulary;
  }
}

}  // namespace lockstep::reference

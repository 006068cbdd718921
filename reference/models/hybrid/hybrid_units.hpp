// The units of a hybrid model over a packed batch. Included by hybrid_model.cpp and
// hybrid_units.cpp alone.
#pragma once

#include <memory>

#include "reference/models/hybrid/hybrid_model.hpp"
#include "reference/tensors/array.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::reference {

/// A row inside its batch.
struct PackedRow {
  const HybridRow* row;
  RowRange range;                     ///< of the batch's tokens
  std::span<double> state;            ///< a copy of the row's slot, on which units work
  std::vector<std::int32_t> parents;  ///< of a verification: reference/recurrent/tree.hpp
  std::vector<std::vector<std::uint32_t>> paths;  ///< by draft of a tree: the KV slots that it sees

  /// The distance of a unit's slots from those that the row names.
  static std::uint32_t distance(std::span<const std::uint32_t> layers, std::size_t layer) {
    return layers.empty() ? 0 : layers[layer];
  }

  /// The KV slots that token i of the row sees, itself included.
  std::span<const std::uint32_t> seen_by(std::int64_t i) const {
    const std::int64_t draft = i - row->inputs();
    if (0 <= draft && draft < row->drafts && !paths.empty())
      return paths[static_cast<std::size_t>(draft)];
    return row->kv.first(static_cast<std::size_t>(row->begin + i + 1));
  }
};

struct Batch {
  std::vector<PackedRow> rows;
  std::vector<std::int32_t> positions;  // [T]
  SlotPool kv, states;
};

using Inputs = TensorView<const double, 2>;  // [T, hidden]

class Unit {
 public:
  virtual ~Unit() = default;
  virtual std::size_t kv_size() const { return 0; }
  virtual std::size_t recurrent_size() const { return 0; }
  virtual std::size_t conv_size() const { return 0; }
  /// Adds the unit's output for x to `sum`, [T, hidden]. Its KV, its recurrent part and its conv
  /// part begin at these doubles of a slot.
  virtual void add(const Inputs& x, const Batch& batch, TensorView<double, 2> sum) const = 0;

  /// Moves the unit's parts of a state over one token, [1, hidden].
  virtual void replay(const Inputs& /*x*/, std::span<double> /*state*/) const {}

  std::size_t kv_first = 0, recurrent_first = 0, conv_first = 0;
  std::size_t layer = 0;  ///< the unit's place among those with KV, or among those with a state

 protected:
  /// The unit's KV in a slot that the row names.
  double* kv_at(const Batch& batch, const PackedRow& row, std::uint32_t slot) const {
    if (!row.row->kv_places.empty()) return row.row->kv_places[layer * row.row->kv.size() + slot];
    return batch.kv.at(slot + PackedRow::distance(row.row->kv_layers, layer)) + kv_first;
  }
  /// `width` doubles from `first` on of the unit's KV in these slots, a row a slot.
  Matrix<double> gathered(const Batch& batch, const PackedRow& row,
                          std::span<const std::uint32_t> slots, std::int64_t first,
                          std::int64_t width) const;
};

/// `weights` must outlive the unit.
std::unique_ptr<Unit> make_unit(const HybridConfig& config, const HybridUnit& unit,
                                const HybridWeights& weights);

/// The norm's factors: its weight, plus 1 where norms are zero-centred.
Array<double, 1> norm_factors(const HybridConfig& config, const HybridWeights& weights,
                              const std::string& name);

}  // namespace lockstep::reference

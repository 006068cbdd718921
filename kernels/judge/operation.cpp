#include "kernels/judge/operation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "reference/tensors/grid.hpp"

namespace lockstep::judging {

std::vector<const JudgedKernel*>& judged_kernels() {
  static std::vector<const JudgedKernel*> all;
  return all;
}

// --- Case ----------------------------------------------------------------------------------------

const Tensor* Case::find(std::string_view wanted) const {
  for (const Tensor& one : tensors)
    if (one.name == wanted) return &one;
  return nullptr;
}

const Tensor& Case::tensor(std::string_view wanted) const {
  const Tensor* const found = find(wanted);
  require(found != nullptr, "a case gives the arguments that its definition takes");
  return *found;
}

bool Case::flag(std::string_view wanted) const {
  for (const Scalar& one : scalars)
    if (one.name == wanted) return std::get<bool>(one.value);
  return false;
}

std::optional<double> Case::number(std::string_view wanted) const {
  for (const Scalar& one : scalars)
    if (one.name == wanted) {
      if (const auto* const integer = std::get_if<std::int64_t>(&one.value))
        return static_cast<double>(*integer);
      return std::get<double>(one.value);
    }
  return std::nullopt;
}

std::string Case::text(std::string_view wanted) const {
  for (const Scalar& one : scalars)
    if (one.name == wanted) return std::get<std::string>(one.value);
  return "";
}

// --- Batch ---------------------------------------------------------------------------------------

std::int64_t Batch::tokens() const {
  return std::accumulate(lengths.begin(), lengths.end(), behind);
}

std::int64_t Batch::slot_count() const {
  if (in_order) return rows();
  return rows() * std::max<std::int64_t>(columns, 1) * (apart ? 2 : 1) + 4 + first_slot;
}

bool Batch::is_padding(std::int64_t row) const {
  return std::find(padding_rows.begin(), padding_rows.end(), row) != padding_rows.end();
}

/// The slots first_slot + 1 ... slot_count() - 2, permuted by the seed.
std::vector<std::int32_t> Batch::order() const {
  if (in_order) {
    std::vector<std::int32_t> same(lengths.size());
    std::iota(same.begin(), same.end(), 0);
    return same;
  }
  std::vector<std::int32_t> slots(static_cast<std::size_t>(slot_count() - first_slot - 2));
  std::iota(slots.begin(), slots.end(), static_cast<std::int32_t>(first_slot) + 1);
  for (std::size_t i = slots.size(); i > 1; --i)
    std::swap(slots[i - 1], slots[random_below(i, seed, 900, i)]);
  return slots;
}

std::vector<std::int32_t> Batch::starts() const {
  std::vector<std::int32_t> all{0};
  for (const std::int64_t length : lengths)
    all.push_back(all.back() + static_cast<std::int32_t>(length));
  return all;
}

std::vector<std::int32_t> Batch::indices() const {
  const auto width = static_cast<std::size_t>(std::max<std::int64_t>(columns, 1));
  const std::vector<std::int32_t> slots = order();
  std::vector<std::int32_t> all;
  for (std::int64_t row = 0; row < rows(); ++row)
    for (std::size_t c = 0; c < width; ++c) {
      std::int32_t entry = slots[static_cast<std::size_t>(row) * width + c];
      // Padding entries are pad_slot_id if it is a slot number; otherwise negative numbers in
      // turns.
      if (is_padding(row)) entry = pad_slot_id >= 0 ? pad_slot_id : (c % 2 == 0 ? -1 : -7);
      all.push_back(entry);
    }
  return all;
}

std::vector<std::int32_t> Batch::out_indices() const {
  const std::vector<std::int32_t> slots = order();
  std::vector<std::int32_t> all;
  for (std::int64_t row = 0; apart && row < rows(); ++row)
    all.push_back(is_padding(row) ? -1 : slots[static_cast<std::size_t>(rows() + row)]);
  return all;
}

std::vector<std::int32_t> Batch::accepted() const {
  std::vector<std::int32_t> all;  // with zeros among them, which count as 1
  for (std::int64_t row = 0; row < rows(); ++row)
    all.push_back(static_cast<std::int32_t>(
        row == 0 ? columns
                 : random_below(static_cast<std::uint64_t>(columns) + 1, seed, 901,
                                static_cast<std::uint64_t>(row))));
  return all;
}

void Batch::describe(Case& into) const {
  const std::vector<std::int32_t> entries = indices(), counts = accepted(), moved = out_indices();
  const auto width = static_cast<std::size_t>(std::max<std::int64_t>(columns, 1));
  const bool has_counts = columns > 0 && with_accepted;
  if (packed) into.tensors.push_back(judging::indices("query_start_loc", {rows() + 1}, starts()));
  if (!in_order && columns > 0)
    into.tensors.push_back(
        judging::indices("state_indices", {rows(), columns}, entries, {"row", "column"}));
  if (!in_order && columns == 0)
    into.tensors.push_back(judging::indices("state_indices", {rows()}, entries, {"row"}));
  if (apart)
    into.tensors.push_back(judging::indices("state_out_indices", {rows()}, moved, {"row"}));
  if (has_counts)
    into.tensors.push_back(judging::indices("num_accepted_tokens", {rows()}, counts, {"row"}));
  if (pad_slot_id != -1)
    into.scalars.push_back({"pad_slot_id", static_cast<std::int64_t>(pad_slot_id)});

  into.slots.assign(static_cast<std::size_t>(slot_count()), {});
  const auto use = [&](std::int32_t slot, SlotUse how, const CaseToken& token) {
    if (slot < 0) return;
    CaseSlot& named = into.slots[static_cast<std::size_t>(slot)];
    named.read = named.read || how == SlotUse::read;
    if (named.use != SlotUse::written) named.use = how, named.token = token;
  };
  for (std::int64_t row = 0; row < rows(); ++row) {
    const auto n = static_cast<std::size_t>(row);
    const std::int64_t count = has_counts ? std::max(counts[n], 1) : 1;
    CaseToken token{
        .row = row, .row_size = lengths[n], .padding = is_padding(row), .accepted = count};
    for (std::int64_t i = 0; i < lengths[n]; ++i) {
      token.position = i;
      into.tokens.push_back(token);
    }
    if (token.padding) continue;
    const auto entry = [&](std::int64_t column) {
      return in_order ? static_cast<std::int32_t>(row)
                      : entries[n * width + static_cast<std::size_t>(column)];
    };
    if (lengths[n] == 0) {
      if (entry(0) >= 0) into.slots[static_cast<std::size_t>(entry(0))].token = token;
      continue;
    }
    use(entry(one_slot_per_row ? 0 : count - 1), SlotUse::read, token);
    if (!writes) continue;
    if (columns > 0 && !one_slot_per_row) {
      for (std::int64_t i = 0; i < std::min(lengths[n], columns); ++i) {
        token.position = i;
        use(entry(i), SlotUse::written, token);
      }
    } else {
      token.position = lengths[n] - 1;
      use(apart ? moved[n] : entry(0), SlotUse::written, token);
    }
  }
  for (std::int64_t i = 0; i < behind; ++i) into.tokens.push_back({.padding = true});
}

std::vector<RowKind> row_kinds(const std::string& drafts) {
  return {
      {.name = "decode",
       .batch = {.lengths = std::vector<std::int64_t>(9, 1), .padding_rows = {2, 7}}},
      {.name = "decode-one-row", .batch = {.lengths = {1}}},
      {.name = "packed-rows",
       .batch =
           {.lengths = {1, 3, 0, 1, 7, 1, 2, 1}, .behind = 2, .padding_rows = {3}, .packed = true}},
      {.name = "packed-one-token", .batch = {.lengths = {1}, .packed = true}},
      {.name = drafts,
       .batch = {.lengths = {4, 1, 2, 4, 1, 3, 1},
                 .behind = 1,
                 .columns = 4,
                 .padding_rows = {3, 4},
                 .packed = true}},
      {.name = drafts + "-one-row", .batch = {.lengths = {3}, .columns = 4, .packed = true}},
      {.name = "verify-snapshots",
       .batch = {.lengths = {1, 4, 1, 3, 1}, .behind = 1, .padding_rows = {2}, .packed = true},
       .snapshots = true},
  };
}

std::vector<RowKind> recurrence_row_kinds() {
  std::vector<RowKind> kinds = row_kinds("verify-table");
  kinds.push_back({.name = "decode-to-other-slots",
                   .batch = {.lengths = {1, 1, 1, 1}, .padding_rows = {2}, .apart = true}});
  return kinds;
}

// --- HostRows ------------------------------------------------------------------------------------

namespace {

std::optional<Array<std::int32_t, 1>> list_of(const Case& from, std::string_view name) {
  const Tensor* const tensor = from.find(name);
  if (tensor == nullptr || tensor->extents.size() != 1) return std::nullopt;
  return array_of<std::int32_t, 1>(*tensor, tensor->values);
}

std::optional<IndexView> seen(const std::optional<Array<std::int32_t, 1>>& list) {
  if (!list) return std::nullopt;
  return list->view();
}

}  // namespace

HostRows::HostRows(const Case& from)
    : starts(list_of(from, "query_start_loc")),
      indices(list_of(from, "state_indices")),
      out_indices(list_of(from, "state_out_indices")),
      accepted(list_of(from, "num_accepted_tokens")),
      tree(list_of(from, "parents")) {
  if (const Tensor* const tensor = from.find("state_indices");
      tensor && tensor->extents.size() == 2)
    table = array_of<std::int32_t, 2>(*tensor, tensor->values);
  if (const auto given = from.number("pad_slot_id"))
    pad_slot_id = static_cast<std::int32_t>(*given);
}

std::optional<IndexView> HostRows::query_start_loc() const {
  return seen(starts);
}
std::optional<IndexView> HostRows::parents() const {
  return seen(tree);
}

StateSlots HostRows::slots() const {
  StateSlots all{.indices = seen(indices),
                 .out_indices = seen(out_indices),
                 .num_accepted = seen(accepted),
                 .pad_slot_id = pad_slot_id};
  if (table) all.table = table->view();
  return all;
}

// --- Tensors -------------------------------------------------------------------------------------

Tensor Draw::operator()(std::string name, ElementType type, const Extents& extents,
                        std::vector<std::string> axes) {
  Tensor tensor{.name = std::move(name),
                .type = type,
                .extents = extents,
                .strides = contiguous(extents),
                .axes = std::move(axes)};
  const Grid grid{.seed = seed_, .stream = ++stream_};
  tensor.values.resize(static_cast<std::size_t>(tensor.count()));
  for (std::size_t i = 0; i < tensor.values.size(); ++i) tensor.values[i] = grid(i);
  return tensor;
}

Tensor Draw::output(std::string name, ElementType type, const Extents& extents,
                    std::vector<std::string> axes) {
  return {.name = std::move(name),
          .type = type,
          .role = Role::output,
          .extents = extents,
          .strides = contiguous(extents),
          .axes = std::move(axes)};
}

Tensor Draw::states(std::string name, ElementType type, const Extents& extents,
                    std::vector<std::string> axes) {
  Tensor states = output(std::move(name), type, extents, std::move(axes));
  states.role = Role::state;
  states.values.assign(static_cast<std::size_t>(states.count()),
                       std::numeric_limits<double>::quiet_NaN());
  return states;
}

Case with_fine_states(Case c, std::uint64_t seed) {
  Grid fine{.seed = seed, .stream = std::uint64_t{1} << 32};
  for (Tensor& tensor : c.tensors) {
    ++fine.stream;
    if (tensor.role != Role::state || tensor.type != ElementType::float32) continue;
    for (std::size_t i = 0; i < tensor.values.size(); ++i)
      if (tensor.values[i] != 0) tensor.values[i] += fine(i) / 512;  // -0 stays what it is
  }
  return c;
}

Tensor indices(std::string name, const Extents& extents, const std::vector<std::int32_t>& values,
               std::vector<std::string> axes) {
  return {.name = std::move(name),
          .type = ElementType::int32,
          .extents = extents,
          .strides = contiguous(extents),
          .values = {values.begin(), values.end()},
          .axes = std::move(axes)};
}

namespace {

/// Writes NaN to the values whose index in dimension 0 satisfies bad(index).
template <class Bad>
void poison(Tensor& tensor, Bad bad) {
  const std::int64_t rows = tensor.extents.at(0);
  const std::int64_t size = rows == 0 ? 0 : tensor.count() / rows;
  for (std::int64_t row = 0; row < rows; ++row)
    if (bad(static_cast<std::size_t>(row)))
      std::fill_n(tensor.values.begin() + row * size, size,
                  std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

void add_fresh_rows(Case& c, std::int64_t rows, const std::vector<std::int64_t>& fresh) {
  const auto is_fresh = [&](std::int64_t row) {
    return std::find(fresh.begin(), fresh.end(), row) != fresh.end();
  };
  std::vector<std::int32_t> resumes;
  for (std::int64_t row = 0; row < rows; ++row) resumes.push_back(is_fresh(row) ? 0 : 1);
  c.tensors.push_back(indices("has_initial_state", {rows}, resumes, {"row"}));
  c.tensors.back().type = ElementType::boolean;
  for (CaseSlot& slot : c.slots) {
    if (!is_fresh(slot.token.row)) continue;
    slot.read = false;
    if (slot.token.row_size == 0) slot.use = SlotUse::written;  // with zeros
  }
}

void poison_padding(Tensor& tensor, const Case& of) {
  poison(tensor, [&](std::size_t token) { return of.tokens[token].padding; });
}

void poison_unread(Tensor& tensor, const Case& of) {
  poison(tensor, [&](std::size_t slot) { return !of.slots[slot].read; });
}

void spread(Tensor& tensor, std::size_t dimension, std::int64_t gap) {
  for (std::size_t d = 0; d <= dimension; ++d) {
    std::int64_t inner = 1;
    for (std::size_t i = d + 1; i < tensor.extents.size() && i <= dimension; ++i)
      inner *= tensor.extents[i];
    tensor.strides[d] += gap * inner;
  }
}

namespace {

// Not NAME-far: `--case decode` asks for no case of 10 GB.
constexpr const char* kFarName = "far-offsets";

Case far_apart(Case c) {
  const auto state = std::find_if(c.tensors.begin(), c.tensors.end(), [](const Tensor& one) {
    return one.role == Role::state || one.name == "kv_cache";
  });
  require(state != c.tensors.end(), "a case whose states lie far apart has states");
  // No row names the last slot of a pool.
  const std::int64_t last = state->extents[0] - (state->axes[0] == "slot" ? 2 : 1);
  constexpr std::int64_t kAligned = 64;
  state->far = ((std::int64_t{1} << 31) / last + kAligned) / kAligned * kAligned;
  c.name = kFarName;
  c.about += fmt::format(", {} with a stride of {}", state->name, state->far);
  return c;
}

}  // namespace

std::vector<CasePlan> with_large(std::vector<CasePlan> plans, const std::vector<CasePlan>& wide,
                                 std::string_view far) {
  for (const CasePlan& plan : wide) {
    plans.push_back(plan);
    plans.back().large = true;
  }
  if (far.empty()) return plans;
  const auto near = std::find_if(plans.begin(), plans.end(),
                                 [&](const CasePlan& plan) { return plan.name == far; });
  require(near != plans.end(), "the case that is made again with its states apart is there");
  plans.push_back(
      {.name = kFarName,
       .make = [make = near->make](const CaseOptions& options) { return far_apart(make(options)); },
       .large = true});
  return plans;
}

void swap_last_two(Tensor& tensor) {
  const std::size_t n = tensor.extents.size();
  tensor.strides[n - 2] = 1;
  tensor.strides[n - 1] = tensor.extents[n - 2];
}

void change_slots(HostRows& rows, std::string_view mistake, std::int64_t tokens) {
  if (mistake == "row-slots") {
    const std::int64_t count = lockstep::row_count(rows.query_start_loc(), tokens);
    rows.table.reset(), rows.accepted.reset(), rows.out_indices.reset();
    rows.indices.emplace(Shape<1>{count}, 0);
    std::iota(rows.indices->begin(), rows.indices->end(), 0);
  }
  if (!rows.accepted || !rows.table) return;
  const auto columns = static_cast<std::int32_t>(rows.table->extent(1));
  for (std::int32_t& n : *rows.accepted) {
    if (mistake == "first-column") n = 1;
    if (mistake == "next-column") n = std::min(std::max(n, 0) + 1, columns);
  }
}

StoragePoints storage_of(const Case& of, std::string_view state, bool rounded) {
  if (!rounded) return {};
  return {.state = format_of(of.tensor(state).type), .output = format_of(of.tensor("out").type)};
}

}  // namespace lockstep::judging

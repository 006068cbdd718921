#include "kernels/judge/batches.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "reference/base/counted.hpp"

namespace lockstep::judging {
namespace {

using Ranges = std::vector<RowRange>;

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// The entries of each row in a dimension of that name; empty: the dimension is not of rows.
Ranges ranges_of(const Case& c, std::string_view axis) {
  const std::int64_t rows = row_count(c);
  const auto by = [&](auto size) {
    Ranges ranges;
    for (std::int64_t row = 0, begin = 0; row < rows; ++row) {
      const std::int64_t end = begin + size(static_cast<std::size_t>(row));
      ranges.push_back({begin, end});
      begin = end;
    }
    return ranges;
  };
  const auto by_starts = [&](std::string_view list) {
    const Tensor* const starts = c.find(list);
    return by([&](std::size_t row) {
      return starts == nullptr
                 ? 1
                 : static_cast<std::int64_t>(starts->values[row + 1] - starts->values[row]);
    });
  };
  if (is_one_of(axis, {"row", "request"})) return by([](std::size_t) { return 1; });
  if (axis == "token") return by_starts("query_start_loc");
  if (axis == "key") return by_starts("key_start_loc");
  if (axis != "boundary") return {};
  const Ranges tokens = by_starts("query_start_loc");
  const auto every = static_cast<std::int64_t>(c.number("boundary_every").value_or(1));
  return by([&](std::size_t row) { return tokens[row].size() / every; });
}

bool has_slot_list(const Case& c) {
  return c.find("state_indices") != nullptr;
}

/// The slots of a batch: those of the case, and after them copies for rows that come again. Without
/// a list of slots row i has slot i.
struct Slots {
  RowList from;               ///< the case's slot that each is
  RowList copied_for;         ///< places of the rows that have the copies
  std::vector<Tensor> lists;  ///< state_indices and state_out_indices

  Slots(const Case& c, const RowList& rows) {
    if (!has_slot_list(c)) {
      from = rows;
      return;
    }
    from.resize(c.slots.size());
    std::iota(from.begin(), from.end(), 0);
    for (const Tensor& one : c.tensors) {
      if (!is_one_of(one.name, {"state_indices", "state_out_indices"})) continue;
      lists.push_back(one);
      lists.back().values.clear();
      lists.back().extents[0] = static_cast<std::int64_t>(rows.size());
    }
    std::set<std::int64_t> seen;
    for (std::size_t place = 0; place < rows.size(); ++place) {
      const bool again = !seen.insert(rows[place]).second;
      name(c, rows[place], again, static_cast<std::int64_t>(place));
    }
  }

 private:
  void name(const Case& c, std::int64_t row, bool again, std::int64_t place) {
    std::map<double, double> names;  // in the order of the slots
    for (const Tensor& list : lists)
      for (const double entry : entries(c.tensor(list.name), row)) {
        const bool used = entry >= 0 && entry < static_cast<double>(c.slots.size()) &&
                          c.slots[static_cast<std::size_t>(entry)].use != SlotUse::unused;
        if (used && again) names[entry] = 0;
      }
    for (auto& [slot, copy] : names) {
      copy = static_cast<double>(from.size());
      from.push_back(static_cast<std::int64_t>(slot));
      copied_for.push_back(place);
    }
    for (Tensor& list : lists)
      for (const double entry : entries(c.tensor(list.name), row))
        list.values.push_back(names.contains(entry) ? names.at(entry) : entry);
  }

  static std::vector<double> entries(const Tensor& list, std::int64_t row) {
    const std::int64_t width = list.count() / list.extents[0];
    const auto begin = list.values.begin() + row * width;
    return {begin, begin + width};
  }
};

/// The tensor with those elements of dimension d. Holes stay as wide as they were.
Tensor gathered(const Tensor& tensor, std::size_t d, const RowList& list) {
  Tensor made = tensor;
  const auto count = static_cast<std::int64_t>(list.size());
  made.extents[d] = count;
  if (tensor.strides == contiguous(tensor.extents)) {
    made.strides = contiguous(made.extents);
  } else {
    std::map<std::int64_t, std::size_t> around;  // dimensions whose steps pass over this one
    for (std::size_t i = 0; i < tensor.extents.size(); ++i)
      if (tensor.strides[i] > tensor.strides[d]) around[tensor.strides[i]] = i;
    std::int64_t more = (count - tensor.extents[d]) * tensor.strides[d];
    for (const auto& [stride, i] : around) {
      made.strides[i] += more;
      more *= tensor.extents[i];
    }
  }
  if (tensor.values.empty()) return made;
  std::int64_t outer = 1, inner = 1;
  for (std::size_t i = 0; i < d; ++i) outer *= tensor.extents[i];
  for (std::size_t i = d + 1; i < tensor.extents.size(); ++i) inner *= tensor.extents[i];
  made.values.resize(static_cast<std::size_t>(made.count()));
  auto to = made.values.begin();
  for (std::int64_t i = 0; i < outer; ++i)
    for (const std::int64_t from : list)
      to = std::copy_n(tensor.values.begin() + (i * tensor.extents[d] + from) * inner, inner, to);
  return made;
}

Tensor of_rows(const Case& c, const Tensor& tensor, const Slots& slots, const RowList& rows) {
  const bool starts = is_one_of(tensor.name, {"query_start_loc", "key_start_loc"});
  if (starts) {
    const Ranges ranges = ranges_of(c, tensor.name == "key_start_loc" ? "key" : "token");
    std::vector<std::int32_t> all{0};
    for (const std::int64_t row : rows)
      all.push_back(all.back() +
                    static_cast<std::int32_t>(ranges[static_cast<std::size_t>(row)].size()));
    return indices(tensor.name, {static_cast<std::int64_t>(all.size())}, all);
  }
  for (const Tensor& list : slots.lists)
    if (list.name == tensor.name) return list;
  Tensor made = tensor;
  for (std::size_t d = 0; d < tensor.axes.size(); ++d) {
    const Ranges ranges = ranges_of(c, tensor.axes[d]);
    if (tensor.axes[d] == "slot") made = gathered(made, d, slots.from);
    if (ranges.empty()) continue;
    RowList list;
    for (const std::int64_t row : rows) {
      const RowRange& own = ranges[static_cast<std::size_t>(row)];
      for (std::int64_t i = own.begin; i < own.end; ++i) list.push_back(i);
    }
    made = gathered(made, d, list);
  }
  return made;
}

}  // namespace

std::int64_t row_count(const Case& c) {
  if (const Tensor* const starts = c.find("query_start_loc")) return starts->extents[0] - 1;
  for (const std::string_view axis : {"row", "request", "token"})
    for (const Tensor& one : c.tensors)
      for (std::size_t d = 0; d < one.axes.size(); ++d)
        if (one.axes[d] == axis) return one.extents[d];
  return 0;
}

Case with_rows(const Case& c, const RowList& rows) {
  const Slots slots(c, rows);
  Case made = c;
  made.tensors.clear(), made.tokens.clear(), made.slots.clear();
  for (const Tensor& tensor : c.tensors) made.tensors.push_back(of_rows(c, tensor, slots, rows));
  const Ranges tokens = ranges_of(c, "token");
  for (std::size_t place = 0; place < rows.size() && !c.tokens.empty(); ++place) {
    const RowRange& own = tokens[static_cast<std::size_t>(rows[place])];
    for (std::int64_t t = own.begin; t < own.end; ++t) {
      made.tokens.push_back(c.tokens[static_cast<std::size_t>(t)]);
      made.tokens.back().row = static_cast<std::int64_t>(place);
    }
  }
  for (std::size_t i = 0; i < slots.from.size() && !c.slots.empty(); ++i) {
    CaseSlot slot = c.slots[static_cast<std::size_t>(slots.from[i])];
    const auto place = std::find(rows.begin(), rows.end(), slot.token.row);
    if (!has_slot_list(c))
      slot.token.row = static_cast<std::int64_t>(i);
    else if (i >= c.slots.size())
      slot.token.row = slots.copied_for[i - c.slots.size()];
    else if (slot.use != SlotUse::unused && place != rows.end())
      slot.token.row = place - rows.begin();
    else
      slot = {};
    made.slots.push_back(slot);
  }
  return made;
}

std::optional<Case> with_fewer_rows(const Case& c) {
  Case fewer = c;
  const std::int64_t rows = row_count(c);
  const auto taken_out = [](std::int64_t row) { return row >= 0 && row % 2 == 1; };
  bool any = false;
  const auto change = [&](std::string_view list, double to) {
    for (Tensor& one : fewer.tensors) {
      if (one.name != list) continue;
      const std::int64_t width = one.count() / std::max<std::int64_t>(1, rows);
      for (std::int64_t row = 1; row < rows; row += 2, any = true)
        std::fill_n(one.values.begin() + row * width, width, to);
    }
  };
  const double pad = c.number("pad_slot_id").value_or(-1);
  change("state_indices", pad), change("state_out_indices", pad), change("seq_lens", 0);
  if (!any) return std::nullopt;
  for (CaseToken& token : fewer.tokens) token.padding = token.padding || taken_out(token.row);
  for (CaseSlot& slot : fewer.slots)
    if (slot.use != SlotUse::unused && taken_out(slot.token.row)) slot = {};
  return fewer;
}

namespace {

/// The results of a row: bytes of each one, in the order of its elements.
using RowResult = std::map<std::string, Bytes>;

bool is_padding(const Case& c, std::int64_t row) {
  return std::any_of(c.tokens.begin(), c.tokens.end(),
                     [&](const CaseToken& token) { return token.row == row && token.padding; });
}

/// The row of each index of a dimension, -1 where nobody's result lies; empty: not one of rows.
RowList owners(const Case& c, const Tensor& tensor, std::size_t d) {
  RowList owner(static_cast<std::size_t>(tensor.extents[d]), -1);
  if (tensor.axes[d] == "slot") {
    for (std::size_t i = 0; i < owner.size(); ++i)
      if (c.slots[i].use == SlotUse::written) owner[i] = c.slots[i].token.row;
    return owner;
  }
  const Ranges ranges = ranges_of(c, tensor.axes[d]);
  for (std::size_t row = 0; row < ranges.size(); ++row)
    for (std::int64_t i = ranges[row].begin; i < ranges[row].end; ++i)
      owner[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(row);
  return ranges.empty() ? RowList() : owner;
}

/// Of each row of a batch. A padding row has none.
std::vector<RowResult> results_of(const Case& c, const Bytes& run) {
  std::vector<RowResult> results(static_cast<std::size_t>(row_count(c)));
  std::int64_t begin = 0;
  for (const Tensor& tensor : c.tensors) {
    const char* const bytes = run.data() + begin;
    begin += tensor.allocation_bytes();
    if (tensor.role == Role::input) continue;
    RowList owner;
    std::size_t d = 0;
    while (d < tensor.axes.size() && (owner = owners(c, tensor, d)).empty()) ++d;
    if (d == tensor.axes.size()) continue;
    std::int64_t inner = 1;
    for (std::size_t i = d + 1; i < tensor.extents.size(); ++i) inner *= tensor.extents[i];
    // NaN that nobody wrote has bits of its place's own.
    const Bytes before = tensor.values.empty() ? Bytes() : allocation_of(tensor, kRunFills[0]);
    const std::vector<std::int64_t> offsets = byte_offsets(tensor);
    const std::int64_t size = size_of(tensor.type);
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i) / inner % tensor.extents[d];
      const std::int64_t row = owner[static_cast<std::size_t>(index)];
      if (row < 0) continue;
      Bytes& to = results[static_cast<std::size_t>(row)][tensor.name];
      const char* const at = bytes + offsets[i];
      const bool unwritten = !before.empty() && std::isnan(tensor.values[i]) &&
                             std::equal(at, at + size, before.data() + offsets[i]);
      if (unwritten)
        to.insert(to.end(), static_cast<std::size_t>(size), '\xff');
      else
        to.insert(to.end(), at, at + size);
    }
  }
  for (std::int64_t row = 0; row < row_count(c); ++row)
    if (is_padding(c, row)) results[static_cast<std::size_t>(row)].clear();
  return results;
}

std::string listed(const RowList& rows) {
  constexpr std::size_t kShown = 12;
  std::string text;
  for (std::size_t i = 0; i < std::min(rows.size(), kShown); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(rows[i]);
  return rows.size() > kShown ? fmt::format("{}, … ({} rows)", text, rows.size()) : text;
}

/// Runs a case's rows in batches, and keeps what each row left in the first one.
class BatchComparison {
 public:
  BatchComparison(const Case& c, CandidateProcess& process) : case_(c), process_(process) {}

  /// Compares what is known of the rows with what they have left here.
  void compare(const RowList& rows, const std::vector<RowResult>& results) {
    ++found_.batches;
    for (std::size_t place = 0; place < rows.size() && !difference_; ++place) {
      if (results[place].empty()) continue;
      const auto [known, is_new] =
          known_.try_emplace(rows[place], Left{rows, place, results[place]});
      if (!is_new && known->second.result != results[place])
        difference_ = {known->second, {rows, place, results[place]}};
    }
  }

  /// Nothing where the candidate does not take the batch.
  Result<std::optional<std::vector<RowResult>>> run(const RowList& rows) {
    const Case batch = with_rows(case_, rows);
    const Result<CaseRuns> runs = process_.run(batch, 1);
    if (!runs) return tl::unexpected(runs.error());
    if (runs->outcome == Outcome::done) return results_of(batch, runs->runs[0]);
    if (const auto kind = kind_of(runs->outcome))
      found_.findings.push_back(
          {*kind, fmt::format("in the batch of rows {}: {}", listed(rows), runs->message),
           "an answer", "none"});
    return std::nullopt;
  }

  Result<void> try_batch(const RowList& rows) {
    if (done()) return {};
    const auto results = run(rows);
    if (!results) return tl::unexpected(results.error());
    if (*results) compare(rows, **results);
    return {};
  }
  bool done() const { return difference_.has_value() || !found_.findings.empty(); }

  /// Makes the pair of batches smaller, and reports it.
  Result<BatchFindings> finish() {
    if (!difference_) return found_;
    auto& [one, other] = *difference_;
    const RowList alone{one.rows[one.place]};
    if (one.rows.size() > 1) {  // the row alone differs from one of the two
      const auto results = run(alone);
      if (!results) return tl::unexpected(results.error());
      if (*results) {
        const Left left{alone, 0, (**results)[0]};
        if (left.result == other.result) other = one;
        one = left;
      }
    }
    if (const auto shrunk = shrink(one.result, other); !shrunk)
      return tl::unexpected(shrunk.error());
    std::string where;
    for (const auto& [name, bytes] : one.result)
      if (where.empty() && other.result.at(name) != bytes) where = name;
    const std::string first = listed(one.rows), second = listed(other.rows);
    found_.findings = {{FindingKind::batch_variance,
                        fmt::format("{}: row {} has other bits in the batch of rows {} (as number "
                                    "{}) than in the batch of rows {}",
                                    where, one.rows[one.place], second, other.place, first),
                        fmt::format("the bits of the batch {}", first),
                        fmt::format("others in the batch {}", second)}};
    return found_;
  }

 private:
  struct Left {
    RowList rows;
    std::size_t place;
    RowResult result;
  };

  /// Leaves rows out for as long as the row still has other bits than `right`.
  Result<void> shrink(const RowResult& right, Left& wrong) {
    for (std::size_t size = wrong.rows.size() / 2; size > 0; size = size == 1 ? 0 : (size + 1) / 2)
      for (std::size_t begin = 0; begin < wrong.rows.size();) {
        const std::size_t end = std::min(begin + size, wrong.rows.size());
        Left fewer = wrong;
        RowList& rows = fewer.rows;
        for (std::size_t i = end; i-- > begin;) {
          if (i == wrong.place) continue;
          rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(i));
          if (i < wrong.place) --fewer.place;
        }
        begin = end;
        if (rows.size() == wrong.rows.size()) continue;
        const auto results = run(rows);
        if (!results) return tl::unexpected(results.error());
        if (!*results || (**results)[fewer.place] == right) continue;
        begin -= wrong.rows.size() - rows.size();
        fewer.result = (**results)[fewer.place];
        wrong = std::move(fewer);
      }
    return {};
  }

  const Case& case_;
  CandidateProcess& process_;
  std::map<std::int64_t, Left> known_;  // by row: its first batch
  std::optional<std::pair<Left, Left>> difference_;
  BatchFindings found_;
};

/// Other batches of so many rows: some alone, another order, every second one, and all of them
/// again and again, as far as memory goes.
std::vector<RowList> batches_of(const Case& c, bool on_gpu) {
  constexpr std::int64_t kAlone = 8, kMost = 257;  // beyond what a kernel counts in a byte
  const std::int64_t room = std::int64_t{on_gpu ? 64 : 4} << 20;
  const std::int64_t rows = row_count(c);
  RowList all(static_cast<std::size_t>(rows));
  std::iota(all.begin(), all.end(), 0);
  std::vector<RowList> batches;
  for (std::int64_t i = 0; i < std::min(rows, kAlone); ++i)
    if (const std::int64_t row = i * rows / std::min(rows, kAlone); !is_padding(c, row))
      batches.push_back({row});
  RowList half, again;
  for (std::int64_t row = 1; row < rows; row += 2) half.push_back(row);
  if (!half.empty()) batches.push_back(half);
  std::int64_t bytes = 0;
  for (const Tensor& tensor : c.tensors) bytes += tensor.bytes();
  const std::int64_t most = std::min(kMost, rows * (room / std::max<std::int64_t>(bytes, 1)));
  for (std::int64_t i = 0; i < std::max(most, rows); ++i) again.push_back(rows - 1 - i % rows);
  batches.push_back(again);
  return batches;
}

}  // namespace

Result<BatchFindings> compare_batches(const Case& c, const CaseRuns& runs,
                                      CandidateProcess& process) {
  BatchComparison comparison(c, process);
  const std::int64_t rows = row_count(c);
  if (rows == 0) return BatchFindings{};
  RowList all(static_cast<std::size_t>(rows));
  std::iota(all.begin(), all.end(), 0);
  comparison.compare(all, results_of(c, runs.runs[0]));
  for (const RowList& batch : batches_of(c, process.machine().on_gpu))
    if (const auto tried = comparison.try_batch(batch); !tried)
      return tl::unexpected(tried.error());
  return comparison.finish();
}

}  // namespace lockstep::judging

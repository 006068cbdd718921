#include "cache_sim/policies/vllm/align_worker.hpp"

#include <algorithm>
#include <utility>

#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

AlignWorker::AlignWorker(const BlockRules& rules, BlockMemory& memory)
    : rules_(rules), memory_(memory) {
  for (std::uint32_t group = 0; group < rules.groups.size(); ++group)
    (is_state(rules.groups[group].kind) ? state_groups_ : kv_groups_).push_back(group);
}

// --- Requests ------------------------------------------------------------------------------------

void AlignWorker::admit(std::uint32_t place) {
  if (place >= seats_.size()) seats_.resize(place + 1);
  const std::int64_t old = seats_[place].accepted;
  seats_[place] = Seat{};
  if (rules_.resumes_with_old_accepted) seats_[place].accepted = old;
  memory_.admit(place);
}

// --- A step --------------------------------------------------------------------------------------

void AlignWorker::forward(const std::vector<BlockCopy>& copies, std::span<const WorkerRow> rows) {
  copy_blocks(copies, false);
  for (const WorkerRow& row : rows) prepare(row);
  for (const WorkerRow& row : rows) run(row);
  memory_.launch();
  if (has_running_states())  // of the token that is sampled in any case
    for (const WorkerRow& row : rows) settle(seats_[row.place], *row.request, 1);
  if (rules_.defers_last_group) copy_blocks(copies, true);
  for (const BlockCopy& copy : copies) memory_.check(copy.target);
  for (const WorkerRow& row : rows) check_tables(*row.request);
}

/// All copies; where the last group is deferred, those before the forward or those after it.
void AlignWorker::copy_blocks(const std::vector<BlockCopy>& copies, bool is_late) {
  if (!rules_.copies_blocks) return;
  for (const BlockCopy& copy : copies) {
    if (rules_.copies_first_group_alone && copy.group != 0) continue;
    if (rules_.defers_last_group && is_late != (copy.group + 1 == rules_.groups.size())) continue;
    memory_.copy(copy);
  }
}

/// Before the forward: what another server has sent comes, and the running state goes to its
/// column.
void AlignWorker::prepare(const WorkerRow& row) {
  if (row.external > 0) load(row);
  if (has_running_states()) change_column(row);
}

void AlignWorker::run(const WorkerRow& row) {
  clear();
  for (const std::uint32_t group : kv_groups_) add_kv(row, group);
  const bool verifies = has_running_states() && seats_[row.place].verifies;
  if (has_running_states())
    add_running_states(row);
  else if (!state_groups_.empty())
    add_all_states(row);
  memory_.forward(told(row, verifies));
}

void AlignWorker::receive(const WorkerRow& row) {
  load(row);
  check_tables(*row.request);
}

/// KV comes where the group has a block for it, and with it the state after the last token.
void AlignWorker::load(const WorkerRow& row) {
  const auto is_left_out = [&](std::uint32_t group) {
    return rules_.loads_one_group_less && group + 1 == rules_.groups.size();
  };
  clear();
  for (const std::uint32_t group : kv_groups_)
    if (!is_left_out(group)) add_kv(row, group);
  for (const std::uint32_t group : state_groups_) {
    if (is_left_out(group)) continue;
    const std::int64_t column = (row.start - 1) / rules_.state_block;
    add_states(row, group, column, 0)
        .stores.push_back({row.start, block_at(row.request->tables[group].columns, column)});
  }
  memory_.receive(told(row, false));
}

// --- A row, as the memory is told it -------------------------------------------------------------

void AlignWorker::clear() {
  kv_.clear();
  states_count_ = 0;
}

void AlignWorker::add_kv(const WorkerRow& row, std::uint32_t group) {
  const GroupSpec& spec = rules_.groups[group];
  const std::int64_t first =
      spec.kind == GroupKind::window ? std::max<std::int64_t>(0, row.start - spec.window + 1) : 0;
  kv_.push_back({group, row.request->tables[group].columns, spec.block, first});
}

/// The states of a group that begin in this column or, at the accepted one of a verification,
/// `offset` columns behind it. The window lies in the column itself.
BlockStates& AlignWorker::add_states(const WorkerRow& row, std::uint32_t group, std::int64_t column,
                                     std::int64_t offset) {
  if (states_.size() == states_count_) states_.emplace_back();
  BlockStates& states = states_[states_count_++];
  const std::vector<BlockId>& columns = row.request->tables[group].columns;
  states.group = group;
  states.from_nothing = row.start == 0 && !(row.drafts > 0 && rules_.begins_with_recycled_states);
  states.recurrent = block_at(columns, column + offset);
  states.conv = block_at(columns, column);
  states.conv_begin = offset;
  states.ring = kNullBlock;
  states.pending = 0;
  states.appends = false;
  states.stores.clear();
  return states;
}

BlockRow AlignWorker::told(const WorkerRow& row, bool verifies) const {
  return {.place = row.place,
          .request = row.name,
          .tokens = row.tokens,
          .start = row.start,
          .end = row.end,
          .drafts = row.drafts,
          .external = row.external,
          .verifies = verifies,
          .kv = kv_,
          .states = {states_.data(), states_count_}};
}

// --- States --------------------------------------------------------------------------------------

/// Whether the row runs in the kernels for verifications. A row of one token after the prompt does,
/// even without drafts. A replay of several known tokens does not.
bool AlignWorker::is_verification(const WorkerRow& row, bool is_new) const {
  if (rules_.drafts == 0) return false;
  const std::int64_t n = row.end - row.start;
  if (row.drafts > 0 || (row.start >= row.request->prompt && n == 1)) return true;
  return rules_.verifies_replays && is_new && row.start >= row.request->prompt &&
         n <= rules_.drafts + 1;
}

/// "all" mode: kernels load the state from the column of the token before the row and store one at
/// every block end that they pass, and after the last token.
void AlignWorker::add_all_states(const WorkerRow& row) {
  const std::int64_t block = rules_.state_block;
  const std::int64_t last = ceil_div(row.end, block) - 1;
  for (const std::uint32_t group : state_groups_) {
    BlockStates& states = add_states(row, group, row.start == 0 ? 0 : (row.start - 1) / block, 0);
    for (std::int64_t column = row.start / block; column <= last; ++column)
      if (column == last || !rules_.stores_chunk_ends_alone)
        states.stores.push_back({std::min((column + 1) * block, row.end),
                                 block_at(row.request->tables[group].columns, column)});
  }
}

/// Decides the column in which the row's state runs, and moves the state there from another one.
void AlignWorker::change_column(const WorkerRow& row) {
  Seat& seat = seats_[row.place];
  const std::int64_t block = rules_.state_block;
  const bool is_new = seat.running == kNone;
  const bool verifies = is_verification(row, is_new);
  note_columns(seat, *row.request);
  const std::int64_t unit = rules_.resumes_by_hash_block ? rules_.hash_block : block;
  std::int64_t previous = seat.running;
  if (is_new) previous = row.start == 0 ? kNone : (row.start - 1) / unit;
  const std::int64_t current = ceil_div(row.end, block) - 1;
  // A session's next turn, or sampled tokens that a trace computes in a row without drafts: such a
  // row begins at column `current`, so the accepted state has to be moved there.
  if (rules_.forgets_accepted_before_turn && !verifies) seat.accepted = 1;
  const bool moves_in_place = !is_new && !verifies && seat.accepted > 1;
  if (previous != kNone && (previous != current || moves_in_place)) {
    const std::int64_t bias = rules_.copies_accepted_state ? seat.accepted - 1 : 0;
    move_state(seat, *row.request, previous, current, bias);
    if (rules_.copy_resets_accepted) seat.accepted = 1;
  }
  seat.verifies = verifies;
  seat.settled = false;
  seat.ring = std::exchange(seat.running, current);
  seat.decided = row.end - row.drafts;
}

void AlignWorker::add_running_states(const WorkerRow& row) {
  const Seat& seat = seats_[row.place];
  const bool forgets = rules_.forgets_accepted_without_drafts && row.drafts == 0;
  const std::int64_t offset = seat.verifies && !forgets ? seat.accepted - 1 : 0;
  for (const std::uint32_t group : state_groups_) {
    BlockStates& states = add_states(row, group, seat.running, offset);
    if (rules_.ring > 0) {
      const BlockRequest& request = *row.request;
      states.ring =
          block_at(request.tables[group].columns, row.ring.appends ? seat.running : seat.ring);
      states.pending = row.ring.pending;
      states.appends = row.ring.appends;
    }
    if (!seat.verifies) store_chunk(row, seat.running, states);
    if (!rules_.flushes_write_states && row.ring.pending > 0 && !row.ring.appends)
      states.stores.clear();
    if (!rules_.ring_steps_move_windows && row.ring.appends) states.stores.clear();
    for (std::int64_t i = row.start; seat.verifies && i < row.end; ++i)
      states.stores.push_back(
          {i + 1, block_at(row.request->tables[group].columns, seat.running + i - row.start)});
  }
}

/// A chunk stores its last state, and one inside itself wherever kernels can store one, whether or
/// not the manager uses it.
void AlignWorker::store_chunk(const WorkerRow& row, std::int64_t column,
                              BlockStates& states) const {
  const std::vector<BlockId>& columns = row.request->tables[states.group].columns;
  const std::int64_t position = last_checkpoint(rules_, row.end, rules_.hit_alignment);
  const std::int64_t block = rules_.state_block;
  if (is_checkpoint_valid(rules_, row.start, row.end, position, block))
    states.stores.push_back({position, block_at(columns, ceil_div(row.end, block) - 2)});
  states.stores.push_back({row.end, block_at(columns, column)});
}

/// Keeps each column's first block. When the manager moves a scratch block to another column, the
/// worker's old column still leads to it, and a chunk that passes that column begins with its
/// state.
void AlignWorker::note_columns(Seat& seat, const BlockRequest& request) const {
  seat.columns.resize(state_groups_.size());
  for (std::size_t i = 0; i < state_groups_.size(); ++i) {
    const std::vector<BlockId>& columns = request.tables[state_groups_[i]].columns;
    std::vector<BlockId>& noted = seat.columns[i];
    if (noted.size() < columns.size())
      noted.insert(noted.end(), columns.begin() + std::ssize(noted), columns.end());
  }
}

/// Copies the state at column from + bias to column `to`.
void AlignWorker::move_state(const Seat& seat, const BlockRequest& request, std::int64_t from,
                             std::int64_t to, std::int64_t bias) {
  for (std::size_t i = 0; i < state_groups_.size(); ++i) {
    const std::vector<BlockId>& noted = seat.columns[i];
    const BlockId target = block_at(request.tables[state_groups_[i]].columns, to);
    if (target == kNullBlock) continue;
    memory_.move({.group = state_groups_[i],
                  .recurrent = block_at(noted, from + bias),
                  .conv = block_at(noted, from),
                  .target = target,
                  .bias = bias});
  }
}

/// After the forward: stores the state of a block end that these `kept` tokens have passed. A
/// verification settles twice, first with the one token that it keeps in any case, because a trace
/// may hold other operations before its accept. (In vLLM none comes between.)
void AlignWorker::settle(Seat& seat, const BlockRequest& request, std::int64_t kept) {
  seat.accepted = kept;
  const bool again = std::exchange(seat.settled, true);
  if (state_groups_.empty() || !rules_.keeps_block_ends) return;
  const std::int64_t block = rules_.state_block;
  const std::int64_t end = floor_to(seat.decided + kept - 1, block);
  if (end < seat.decided) return;
  const std::int64_t bias = end - seat.decided;
  const std::int64_t target = end / block - 1;
  if (bias == 0 && (again || target == seat.running)) return;
  LOCKSTEP_MARK("vllm.state_of_a_passed_block_end");
  move_state(seat, request, seat.running, target, bias);
  if (target == seat.running) seat.accepted = 1;
}

void AlignWorker::accept(std::uint32_t place, const BlockRequest& request, std::int64_t kept) {
  settle(seats_[place], request, kept);
  check_tables(request);
}

void AlignWorker::check_tables(const BlockRequest& request) {
  for (const BlockTable& table : request.tables)
    for (const BlockId block : table.columns)
      if (block != kNullBlock) memory_.check(block);
}

}  // namespace lockstep::cache_sim

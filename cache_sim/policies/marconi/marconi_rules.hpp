// The rules of Marconi (reference/caches/marconi.md): where its published simulator differs
// (policy `marconi-artifact`), and where a planted defect breaks one (marconi_defects.cpp). The
// defaults are the paper's.
#pragma once

namespace lockstep::cache_sim {

struct MarconiRules {
  // The accounting of the published simulator.
  bool takes_mlp_for_attention = false;  ///< in the FLOPs of a node's parent
  bool divides_by_whole_prefix = false;  ///< a node's FLOPs, not by its edge alone
  bool insert_matches = false;           ///< an insert also renews what a match would use
  bool frees_anothers_bytes = false;
  bool match_ends_inside_edges = true;

  bool match_renews_path = false;
  bool match_copies_conv = true;
  bool split_moves_state = false;
  bool stores_branches = true;
  bool takes_branch_at_chunk_end = false;
  bool frees_refused_branch = true;
  bool evicts_where_prefixes_part = false;
  bool locks_keep_nodes = true;
  bool merge_passes_kv = true;
  bool tunes_on_cache_of_now = false;
};

}  // namespace lockstep::cache_sim

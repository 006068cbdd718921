// The oracle of vLLM's scheduler: the rules of vLLM 0.33 (vllm/v1/core/sched/scheduler.py and
// async_scheduler.py) as that code has them, without what this project's subjects have no verbs
// for (LoRA, pauses, streams). Of connectors it has those that load from a host's memory.
//
//   here                vLLM
//   computed            num_computed_tokens, advanced when a step is decided
//   tokens              num_tokens: prompt, and outputs whose results are there
//   placeholders        num_output_placeholders: outputs and drafts of forwards under way
//   spec_tokens         len(spec_token_ids): drafts that wait to be verified
//   in_flight, stale    num_in_flight_tokens, num_stale_output_tokens
//   is_prefill          is_prefill_chunk
//   gamma_              num_spec_tokens
//   holding_            kv_holding_waiting: requests in WAITING_FOR_REMOTE_KVS, or back from it
#pragma once

#include <list>
#include <map>
#include <memory>
#include <vector>

#include "reference/caches/schedule_listener.hpp"
#include "reference/caches/vllm_scheduler_config.hpp"

namespace lockstep::reference {

class VllmSchedulerOracle final : public ScheduleListener {
 public:
  explicit VllmSchedulerOracle(const Config& config) : options_(VllmSchedulerConfig::of(config)) {}

 private:
  using Count = std::int64_t;
  enum class Status : std::uint8_t {
    expected,
    waiting,
    waiting_for_remote_kvs,
    loaded,  ///< it waits again, and keeps its blocks
    running,
    finished
  };
  struct Request {
    const RequestSpec* spec = nullptr;
    Status status = Status::expected;
    Count tokens = 0;
    Count computed = 0;
    Count placeholders = 0;
    Count in_flight = 0;
    Count stale = 0;
    Count told = 0;     ///< tokens that the subject knows
    Count arrival = 0;  ///< its number in the order of arrivals
    int lone = 0;       ///< preemptions while it ran alone, since its last token
    bool is_prefill = false;
    Count spec_tokens = 0;
    std::vector<bool>
        needs;  ///< request_cached_ids: by image, whether it holds the encoder's output
    std::size_t verified = 0;  ///< verifications of its line that have had their result
    Count outputs() const { return tokens - spec->prompt_size; }
    Count max_tokens() const;
  };
  struct Scheduled {
    RequestNumber request;
    Count tokens;
    Count spec_tokens;
    bool verifies;
    bool samples;       ///< once the step is decided
    Count encoded = 0;  ///< encoder outputs that the step makes for it
  };

  void play(const SchedulerEvent& event) override;
  SchedulerStatus status(RequestNumber request) override;
  std::unique_ptr<ScheduleListener> copy() const override {
    return std::make_unique<VllmSchedulerOracle>(*this);
  }

  // The encoder and its cache (encoder_cache_manager.py).
  using ImageContent = std::pair<std::string, Tokens>;  ///< its name, or its tokens
  struct Embedding {
    ImageContent image;
    Count size;
    Count references = 0;
    Count unreferenced_since = 0;
  };
  struct EncoderInputs {
    std::vector<std::size_t> scheduled, duplicate;
    Count size = 0;
  };
  static ImageContent image_of(const Request& request, std::size_t input);
  Embedding* embedding_of(const ImageContent& image);
  Count free_places() const;
  bool check_and_update(Request& request, std::size_t input);
  bool can_allocate(Count size, Count scheduled);
  void free_encoder_input(Request& request, std::size_t input);
  void free_encoder_inputs(Request& request, Count up_to);
  EncoderInputs try_schedule_encoder_inputs(Request& request, Count& tokens);
  void allocate_encoder_inputs(Request& request, const EncoderInputs& inputs);

  void schedule();
  void schedule_running();
  Operation look_up(RequestNumber number) const;
  void schedule_waiting();
  bool schedule_holding();
  void start_load(RequestNumber number);
  bool is_ready(RequestNumber number);
  void run(RequestNumber number, Count tokens, Count padding, Count encoded);
  bool fits_nowhere(RequestNumber number) const;
  void sort_by_urgency(std::list<RequestNumber>& queue) const;
  void update_after_schedule();
  void update_from_output();
  Count wanted(const Request& request) const;
  Count proposal(const Request& request) const;
  static Count generated(const Request& request, const Scheduled& row);
  bool pads(const Request& request) const;
  bool allocate(RequestNumber number, Count& tokens, Count spec_tokens, bool verifies);
  RequestNumber least_urgent() const;
  void preempt(RequestNumber number);
  void enqueue(RequestNumber number, bool prepend);
  void abort(RequestNumber number);
  void finish(RequestNumber number, FinishReason reason);
  bool is_empty() const;
  Operation about(Verb verb, RequestNumber number) const;

  VllmSchedulerConfig options_;
  std::map<RequestNumber, Request> requests_;
  std::list<RequestNumber> waiting_;  // under a priority: in any order
  std::list<RequestNumber> holding_;  // likewise
  std::list<RequestNumber> running_;
  std::list<Scheduled> scheduled_;         // of the step that is decided now
  std::list<std::list<Scheduled>> queue_;  // batches under way, the oldest first; none is empty
  Count arrivals_ = 0;
  Count budget_ = 0;
  Count input_budget_ = 0;
  Count threshold_ = 0;
  Count gamma_ = options_.spec_tokens;
  std::list<Embedding> embeddings_;
  Count encoder_budget_ = 0;
  Count clock_ = 0;  ///< of embeddings that nobody references any more
  bool prefill_scheduled_ = false;
  bool running_scheduled_ = false;
  bool preempted_ = false;
  bool results_due_ = false;
  int quiet_ = 0;  ///< steps in a row with an empty running_ at their beginning
};

}  // namespace lockstep::reference

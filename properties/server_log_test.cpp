// check-log: what a server cannot have had cached or said, and no more than that.
#include "cache_sim/logs/server_log.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "properties/support/program.hpp"

namespace lockstep::cache_sim {
namespace {

using testing_support::lines_of;
using testing_support::ProgramRun;
using testing_support::read_text;
using testing_support::run_program;
using testing_support::ScratchFolder;

/// `place without the file: kind` of each finding, or the error.
std::vector<std::string> judged(const std::string& text) {
  const ScratchFolder folder;
  const std::string path = folder.write("log.jsonl", text);
  const auto log = read_log(path);
  if (!log) return {log.error().text.substr(path.size())};
  std::vector<std::string> found;
  for (const LogFinding& one : judge_log(*log))
    found.push_back(
        fmt::format("{}: {}", one.place.substr(path.size()), to_string(one.finding.kind)));
  return found;
}
using Found = std::vector<std::string>;

std::string line(const std::string& id, const std::string& prompt, const std::string& output,
                 int cached, const std::string& more = "") {
  return fmt::format(R"({{"id": "{}", "prompt": [{}], "output": [{}], "cached": {}{}}})"
                     "\n",
                     id, prompt, output, cached, more);
}

std::string sglang_line(const std::string& id, const std::string& prompt, int cached) {
  return fmt::format(R"({{"input_ids": [{}], "output_ids": [4], "meta_info": )"
                     R"({{"id": "{}", "prompt_tokens": 3, "cached_tokens": {}}}}})"
                     "\n",
                     prompt, id, cached);
}

std::string vllm_line(const std::string& id, const std::string& prompt, const std::string& output,
                      int cached) {
  return fmt::format(R"({{"request_id": "{}", "prompt_token_ids": [{}], )"
                     R"("num_cached_tokens": {}, "outputs": [{{"token_ids": [{}]}}]}})"
                     "\n",
                     id, prompt, cached, output);
}

TEST(CheckLog, acceptsWhatAnotherRequestHadBefore) {
  EXPECT_EQ(judged(line("a", "1,2,3,4", "5,6", 0) + line("b", "1,2,3,9", "7", 3) +
                   line("c", "1,2,3,4,5,8", "7", 5)),
            Found{});
}

TEST(CheckLog, findsMoreThanAnyRequestShares) {
  EXPECT_EQ(judged(line("a", "1,2,3,4", "5", 0) + line("b", "1,2,9", "5", 2) +
                   line("c", "1,2,3,8,8", "5", 4)),
            Found{":3: cached-too-much"});
  EXPECT_EQ(judged(line("a", "1,2,3,4", "5", 1)), Found{":1: cached-too-much"});
}

// A whole prompt cannot be cached: its last token's output has to be computed.
TEST(CheckLog, findsAWholePromptThatIsSaidToBeCached) {
  EXPECT_EQ(judged(line("a", "1,2,3", "4", 0) + line("b", "1,2,3", "4", 3)),
            Found{":2: cached-too-much"});
  EXPECT_EQ(judged(line("a", "1,2,3", "4", 0) + line("b", "1,2,3", "4", 2)), Found{});
}

// Caches of different salts never meet.
TEST(CheckLog, saltsKeepRequestsApart) {
  const std::string salted = R"(, "salt": "x")";
  EXPECT_EQ(judged(line("a", "1,2,3", "4", 0, salted) + line("b", "1,2,3", "4", 2)),
            Found{":2: cached-too-much"});
  EXPECT_EQ(judged(line("a", "1,2,3", "4", 0, salted) + line("b", "1,2,3", "4", 2, salted)),
            Found{});
}

// With times, whatever had begun before the end may have been found, whichever line it stands in.
TEST(CheckLog, timesSayWhatMayHaveBeenFound) {
  const auto at = [](double start, double end) {
    return fmt::format(R"(, "start": {}, "end": {})", start, end);
  };
  EXPECT_EQ(judged(line("a", "1,2,3", "4", 2, at(1, 5)) + line("b", "1,2,7", "4", 0, at(2, 3))),
            Found{});
  EXPECT_EQ(judged(line("a", "1,2,3", "4", 2, at(1, 2)) + line("b", "1,2,7", "4", 0, at(3, 4))),
            Found{":1: cached-too-much"});
}

// The heart of it: a hit must not change what is said.
TEST(CheckLog, findsGreedyOutputsThatDiffer) {
  const std::string greedy = R"(, "greedy": true)";
  EXPECT_EQ(judged(line("a", "1,2,3", "4,5,6", 0, greedy) + line("b", "1,2,3", "4,5,7", 2, greedy)),
            Found{":2: output-differs"});
  EXPECT_EQ(judged(line("a", "1,2,3", "4,5,6", 0, greedy) + line("b", "1,2,3", "4,5", 2, greedy)),
            Found{});
  EXPECT_EQ(judged(line("a", "1,2,3", "4,5,6", 0, greedy) + line("b", "1,2,3,4", "9", 3, greedy)),
            Found{":2: output-differs"})
      << "a prompt that goes on as an output did";
  EXPECT_EQ(judged(line("a", "1,2,3", "4,5,6", 0, greedy) + line("b", "1,2,3", "9", 2)), Found{})
      << "sampled outputs may differ";
}

TEST(CheckLog, readsSglangsAndVllmsAnswers) {
  EXPECT_EQ(judged(sglang_line("x", "1,2,3", 0) + sglang_line("y", "1,2,5", 3)),
            Found{":2: cached-too-much"});
  EXPECT_EQ(judged(vllm_line("0", "1,2,3", "4", 0) + vllm_line("1", "1,9,5", "4", 2)),
            Found{":2: cached-too-much"});
  EXPECT_EQ(judged(vllm_line("0", "1,2,3", "4", 0) + vllm_line("1", "1,2,5", "4", 2)), Found{});
}

TEST(CheckLog, refusesBadLines) {
  const std::string good = line("a", "1,2,3", "4", 0);
  EXPECT_EQ(judged(good + line("a", "1,2", "4", 0)), Found{":2: a request `a` stands above"});
  EXPECT_EQ(judged(good + line("b", "1,-2", "4", 0)), Found{":2: field prompt[1]: -2 is below 0"});
  EXPECT_EQ(judged(good + line("b", "", "4", 0)),
            Found{":2: field prompt: a prompt has at least one token"});
  EXPECT_EQ(judged(good + line("b", "1", "4", -1)), Found{":2: field cached: -1 is below 0"});
  EXPECT_EQ(judged(good + line("b c", "1", "4", 0)), Found{":2: field id: holds a blank"});
  EXPECT_EQ(judged(good + line("b", "1", "4", 0, R"(, "start": 3, "end": 2)")),
            Found{":2: field end: is before the start"});
  EXPECT_EQ(judged(good + line("b", "1", "4", 0, R"(, "start": 3, "end": 4)")),
            Found{":2: field start: all requests have times, or none"});
  EXPECT_EQ(judged(good + line("b", "1", "4", 0, R"(, "greedy": 1)")),
            Found{":2: field greedy: a number, not true or false"});
  EXPECT_EQ(judged(R"({"id": "a", "cached": 0})"
                   "\n"),
            Found{":1: field prompt: is missing"});
  EXPECT_EQ(judged(R"({"what": 1})"
                   "\n"),
            Found{":1: its fields are those of no known log"});
  EXPECT_EQ(judged(""), Found{": the log holds no request"});
}

// What the program writes is the same log, and a trace that its own policies can be asked.
TEST(CheckLog, convertsALogIntoItsOwnFormatAndATrace) {
  const ScratchFolder folder;
  const std::string log = folder.write(
      "vllm.jsonl", vllm_line("0", "1,2,3", "4,5", 0) + vllm_line("1", "1,2,3,4,9", "6", 4));
  const ProgramRun run = run_program(
      {"check-log", log, "--log", folder.path("own.jsonl"), "--trace", folder.path("own.trace")});
  EXPECT_EQ(run.status, kExitPass) << run.err;
  EXPECT_EQ(read_text(folder.path("own.jsonl")),
            "{\"id\":\"0\",\"prompt\":[1,2,3],\"output\":[4,5],\"cached\":0}\n"
            "{\"id\":\"1\",\"prompt\":[1,2,3,4,9],\"output\":[6],\"cached\":4}\n");
  const ProgramRun again = run_program({"check-log", folder.path("own.jsonl")});
  EXPECT_EQ(lines_of(again.out).back(), lines_of(run.out).back()) << "the same digest";
  const ProgramRun replayed = run_program({"replay", folder.path("own.trace")});
  EXPECT_EQ(replayed.status, kExitPass) << replayed.err;
}

TEST(CheckLog, theStatusSaysThatSomethingWasFound) {
  const ScratchFolder folder;
  const ProgramRun run =
      run_program({"check-log", folder.write("log.jsonl", line("a", "1,2,3", "4", 3))});
  EXPECT_EQ(run.status, kExitDiffers);
  EXPECT_NE(run.out.find("log.jsonl:1: cached-too-much: request `a`: "), std::string::npos);
  EXPECT_EQ(run_program({"check-log", folder.path("missing")}).status, kExitBadInput);
}

/// A server as far as the recorder sees one; with `lie` it says five cached tokens too many.
constexpr std::string_view kServer = R"(
import json, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
lie, recorder, prompts, out = int(sys.argv[1]), *sys.argv[2:]
stored, lock = [], threading.Lock()
class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = {}
        if self.path == "/generate":
            prompt = json.loads(body)["input_ids"]
            with lock:
                cached = 0
                for other in stored:
                    n = 0
                    while n < len(prompt) - 1 and n < len(other) and prompt[n] == other[n]: n += 1
                    cached = max(cached, n)
                text = list(prompt)
                for _ in range(4): text.append((text[-1] * 7 + len(text)) % 1000)
                stored.append(text)
            meta = {"cached_tokens": cached + lie}
            answer = {"output_ids": text[len(prompt):], "meta_info": meta}
        data = json.dumps(answer).encode()
        self.send_response(200); self.end_headers(); self.wfile.write(data)
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
with open(out, "w") as file:
    subprocess.run([sys.executable, recorder, url, prompts], stdout=file, check=True)
)";

// The recorder's log of a server that tells the truth is accepted, and of one that lies is not.
TEST(CheckLog, judgesWhatTheRecorderWrites) {
  const ScratchFolder folder;
  std::string prompts;
  for (int i = 0; i < 30; ++i) {
    prompts += "[1";
    for (int k = 0; k < 5 + i % 7; ++k) prompts += fmt::format(",{}", 2 + k * (1 + i % 3));
    prompts += "]\n";
  }
  folder.write("prompts.jsonl", prompts);
  const std::string server = folder.write("server.py", std::string(kServer));
  for (const int lie : {0, 5}) {
    const std::string command =
        fmt::format("python3 '{}' {} '{}/fixtures/subjects/record_log.py' '{}' '{}'", server, lie,
                    LOCKSTEP_SOURCE_DIR, folder.path("prompts.jsonl"), folder.path("log.jsonl"));
    ASSERT_EQ(std::system(command.c_str()), 0);  // NOLINT(cert-env33-c)
    const ProgramRun run = run_program({"check-log", folder.path("log.jsonl")});
    EXPECT_EQ(run.status, lie == 0 ? kExitPass : kExitDiffers) << run.out << run.err;
    EXPECT_NE(run.out.find("30 requests"), std::string::npos) << run.out;
  }
}

}  // namespace
}  // namespace lockstep::cache_sim

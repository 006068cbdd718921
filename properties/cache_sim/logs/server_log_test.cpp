// check-log reports cached tokens and outputs that no correct server could give, and nothing else.
#include "cache_sim/logs/server_log.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "properties/support/program.hpp"
#include "reference/base/philox.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace testing_support;

/// `place without the file: kind` of each finding, or the error.
std::vector<std::string> judged(const std::string& text) {
  const ScratchFolder folder;
  const std::string path = folder.write("log.jsonl", text);
  const auto log = read_log(path);
  if (!log) return {log.error().text.substr(path.size())};
  std::vector<std::string> found;
  for (const LogFinding& one : judge_log(*log).findings) {
    EXPECT_EQ(one.place.file, path);
    found.push_back(fmt::format(":{}: {}", one.place.line, to_string(one.finding.kind)));
  }
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

TEST(CheckLog, acceptsCachedTokensOfAnEarlierRequest) {
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

// A server samples the last token and never computes it, so nobody can have it cached.
TEST(CheckLog, findsTheLastSampledTokenSaidToBeCached) {
  const std::string first = line("a", "1,2,3,4", "5,6", 0);
  EXPECT_EQ(judged(first + line("b", "1,2,3,4,5,6,9", "7", 5)), Found{});
  EXPECT_EQ(judged(first + line("b", "1,2,3,4,5,6,9", "7", 6)), Found{":2: cached-too-much"});
  EXPECT_EQ(judged(line("a", "1,2,3,4", "", 0) + line("b", "1,2,3,4,9", "7", 4)), Found{});
}

// The bound by its definition: each request against each other one.
TEST(CheckLog, boundsAreThoseOfComparingEachWithEach) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    std::uint64_t at = 0;
    const auto below = [&](std::uint64_t bound) { return random_below(bound, seed, 3, at++); };
    const bool timed = below(3) != 0;
    std::vector<LoggedRequest> log;
    for (int i = 0; i < 40; ++i) {
      std::vector<std::uint32_t> ids;
      for (std::uint64_t left = 1 + below(7); left > 0; --left)
        ids.push_back(static_cast<std::uint32_t>(below(2)));
      LoggedRequest request;
      request.id = fmt::format("r{}", i);
      request.place = {"log", i + 1};
      request.prompt_size = static_cast<std::uint32_t>(1 + below(ids.size()));
      request.tokens = Tokens::of_ids(ids);
      if (below(4) == 0) request.salt = Name::intern("salted");
      if (timed) request.start = static_cast<Nanoseconds>(below(30));
      if (timed) request.end = request.start + static_cast<Nanoseconds>(below(9));
      log.push_back(request);
    }
    for (std::size_t i = 0; i < log.size(); ++i) {
      std::uint32_t bound = 0;
      for (std::size_t j = 0; j < log.size(); ++j) {
        const bool above = log[j].start < log[i].start || (log[j].start == log[i].start && j < i);
        if (j == i || !(log[j].salt == log[i].salt) || (!above && log[j].start >= log[i].end))
          continue;
        const std::uint32_t left = std::max(log[j].prompt_size, log[j].tokens.size() - 1);
        bound = std::max(
            bound, log[i].tokens.common(0, log[j].tokens, 0, std::min(log[i].prompt_size, left)));
      }
      std::vector<LoggedRequest> asked = log;
      for (LoggedRequest& other : asked) other.cached = 0;
      for (const std::uint32_t cached : {bound, bound + 1}) {
        asked[i].cached = cached;
        const bool too_much = cached > bound || cached >= log[i].prompt_size;
        EXPECT_EQ(judge_log(asked).findings.size(), too_much ? 1u : 0u)
            << seed << " " << i << " " << bound;
      }
    }
  }
}

// Requests that all overlap are no reason to compare each with each.
TEST(CheckLog, workGrowsWithTheLogAndNotWithItsSquare) {
  const auto compared = [](std::uint32_t count) {
    std::vector<LoggedRequest> log(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      std::vector<std::uint32_t> ids(60, 7);
      ids.push_back(i);
      ids.push_back(1);
      log[i].id = fmt::format("r{}", i);
      log[i].tokens = Tokens::of_ids(ids);
      log[i].prompt_size = 61;
      log[i].start = i;
      log[i].end = 1'000'000;
    }
    const std::uint64_t before = Tokens::compared();
    EXPECT_TRUE(judge_log(log).findings.empty());
    return Tokens::compared() - before;
  };
  EXPECT_LT(compared(2000), 12 * compared(200));
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
TEST(CheckLog, tokensOfRequestsThatHadBegunMayBeCached) {
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
  for (const char* const id : {"b\x7F", "b\\u001b[2J",
                               "b\xC2\x9B"
                               "2J"})
    EXPECT_EQ(judged(good + line(id, "1", "4", 0)),
              Found{":2: field id: holds a control character"});
  EXPECT_EQ(judged(good + line("b", "1", "4", 0, R"(, "start": 3, "end": 2)")),
            Found{":2: field end: is before the start"});
  EXPECT_EQ(judged(good + line("b", "1", "4", 0, R"(, "start": 3, "end": 4)")),
            Found{":2: field start: all requests have times, or none"});
  EXPECT_EQ(judged(good + line("b", "1", "4", 0, R"(, "greedy": 1)")),
            Found{":2: field greedy: a number, not true or false"});
  EXPECT_EQ(judged(R"({"id": "a", "cached": 0})"
                   "\n"),
            Found{":1: field prompt: is missing"});
  const std::string vllm =
      R"({"request_id": "0", "prompt_token_ids": [1], "outputs": [{"token_ids": [4]}], )";
  EXPECT_EQ(judged(vllm + R"("num_cached_tokens": null})"),
            Found{":1: field num_cached_tokens: null, not a whole number"});
  EXPECT_EQ(
      judged(
          R"({"request_id": "0", "prompt_token_ids": [1], "outputs": 5, "num_cached_tokens": 0})"),
      Found{":1: field outputs: a number, not an array"});
  EXPECT_EQ(judged(R"({"id": "a", "prompt": null, "output": [4], "cached": 0})"),
            Found{":1: field prompt: null, not an array"});
  EXPECT_EQ(judged(R"({"id": null, "prompt": [1], "output": [4], "cached": 0})"),
            Found{":1: field id: null, not a string"});
  EXPECT_EQ(judged(line("a", "1", "4", 0, R"(, "start": 3, "end": null)")),
            Found{":1: field end: null, not a number"});
  EXPECT_EQ(judged(line("a", "1", "4", 0, R"(, "start": null, "greedy": null)")), Found{})
      << "what may be left out may be null";
  EXPECT_EQ(judged(R"({"what": 1})"
                   "\n"),
            Found{":1: its fields are those of no known log"});
  EXPECT_EQ(judged(""), Found{": the log holds no request"});
}

// A trace is told from a log by its name where its first line is none: a log of that name is read.
TEST(CheckLog, aTraceIsNoLog) {
  const ScratchFolder folder;
  const auto said = [&](const std::string& name, const std::string& text) {
    const Result<std::vector<LoggedRequest>> log = read_log(folder.write(name, text));
    return log ? "" : log.error().text.substr(log.error().text.find(name));
  };
  const std::string trace = "admit id=a tokens=a4\n", log = line("a", "1", "4", 0);
  EXPECT_EQ(said("one.trace", trace), "one.trace: a trace is no log; `lockstep replay` plays it");
  EXPECT_EQ(said("log.trace", log), "");
  for (const auto& [name, text] :
       {std::pair("one.jsonl", trace), std::pair("two.trace", log + trace)})
    EXPECT_EQ(said(name, text).find("lockstep replay"), std::string::npos) << said(name, text);
}

// The program writes the same log, and a trace that its own policies can be asked.
TEST(CheckLog, itsOwnFormatComesBackAsItWas) {
  const ScratchFolder folder;
  const std::string line = R"({"id":"0","prompt":[1,2],"output":[3],"cached":0,)"
                           R"("salt":"x","start":0.5,"end":0.75,"greedy":true})"
                           "\n";
  const std::string log = folder.write("log.jsonl", line);
  const ProgramRun run = run_program({"check-log", log, "--log", folder.path("own.jsonl")});
  EXPECT_EQ(run.status, kExitPass) << run.err;
  EXPECT_EQ(read_text(folder.path("own.jsonl")), line);
}

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
  EXPECT_EQ(lines_of(read_text(folder.path("own.trace"))).back(), "cached=4");
  const ProgramRun replayed = run_program({"replay", folder.path("own.trace")});
  EXPECT_EQ(replayed.status, kExitPass) << replayed.out << replayed.err;
}

// The trace expects as many cached tokens as the server reported, so a policy that caches otherwise
// is found at that request.
TEST(CheckLog, aTraceExpectsWhatTheServerSaid) {
  const ScratchFolder folder;
  const std::string trace = folder.path("log.trace");
  for (const bool timed : {false, true}) {
    const auto at = [&](int start) {
      return timed ? fmt::format(R"(, "start": {}, "end": {})", start, start + 1) : std::string();
    };
    for (const int cached : {2, 3}) {
      const std::string log =
          folder.write("log.jsonl", line("a", "1,2,3", "4", 0, at(1)) +
                                        line("b", "1,2,3,5", "6", cached, at(4)));
      ASSERT_EQ(run_program({"check-log", log, "--trace", trace}).status, kExitPass);
      const ProgramRun run = run_program({"replay", trace, "--subject", "radix"});
      EXPECT_EQ(run.status, cached == 3 ? kExitPass : kExitDiffers) << run.out << run.err;
      EXPECT_EQ(run.out.find("the answer should carry cached=2") != std::string::npos, cached == 2);
    }
  }
}

TEST(CheckLog, saysWhereOutputsWereNotCompared) {
  const ScratchFolder folder;
  const std::string says = "outputs were not compared: no request is marked greedy";
  for (const bool greedy : {false, true}) {
    const std::string mark = greedy ? R"(, "greedy": true)" : "";
    const ProgramRun run =
        run_program({"check-log", folder.write("log.jsonl", line("a", "1,2", "3", 0, mark))});
    EXPECT_EQ(run.out.find(says) == std::string::npos, greedy) << run.out;
  }
}

// Outputs behind prompts that no two requests share are compared with nothing, greedy or not.
TEST(CheckLog, saysHowManyTokensWereCompared) {
  const ScratchFolder folder;
  const std::string greedy = R"(, "greedy": true)", one = line("a", "1,2", "3,4,5", 0, greedy);
  for (const auto& [log, says] :
       {std::pair{one + line("b", "7,8", "9", 0, greedy),
                  "; 0 tokens of 2 greedy outputs compared"},
        {one + line("b", "1,2", "3,4", 1, greedy), "; 2 tokens of 2 greedy outputs compared"},
        {one + line("b", "1,2,3", "4", 2, greedy), "; 1 token of 2 greedy outputs compared"}}) {
    const ProgramRun run = run_program({"check-log", folder.write("log.jsonl", log)});
    EXPECT_NE(run.out.find(says), std::string::npos) << run.out;
  }
}

// Lines in SGLang's and vLLM's own forms can carry the marks as well.
TEST(CheckLog, marksStandInLinesOfEveryForm) {
  const auto marked = [](std::string line) {
    return line.replace(line.rfind('}'), 1, R"(, "greedy": true, "salt": "x"})");
  };
  EXPECT_EQ(judged(marked(vllm_line("0", "1,2,3", "4", 0)) +
                   marked(vllm_line("1", "1,2,3", "5", 2)) + vllm_line("2", "1,2,3", "5", 2)),
            (Found{":2: output-differs", ":3: cached-too-much"}));
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

// The recorder refuses in a sentence, and the log stays empty.
TEST(CheckLog, theRecorderRefusesInASentence) {
  const ScratchFolder folder;
  const std::string texts = folder.write("texts.jsonl", "[1, 2]\n\"a prompt\"\n");
  const std::string good = folder.write("good.jsonl", "[1, 2]\n");
  const auto refusal = [&](const std::string& words) {
    const std::string command =
        fmt::format("python3 '{}/fixtures/subjects/record_log.py' {} > '{}' 2> '{}'",
                    LOCKSTEP_SOURCE_DIR, words, folder.path("log"), folder.path("said"));
    EXPECT_NE(std::system(command.c_str()), 0);  // NOLINT(cert-env33-c)
    EXPECT_TRUE(std::filesystem::is_empty(folder.path("log")));
    std::ifstream said(folder.path("said"));
    return std::string(std::istreambuf_iterator<char>(said), {});
  };
  EXPECT_EQ(refusal(""),
            "record_log.py: the words are URL PROMPTS.jsonl; the log goes to standard output\n");
  EXPECT_EQ(refusal("http://localhost:1 '" + texts + "'"),
            "record_log.py: " + texts + ": line 2 is not a list of token ids\n");
  EXPECT_TRUE(refusal("http://localhost:1 '" + good + "'").starts_with("record_log.py: http"));
}

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

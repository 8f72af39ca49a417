"""Mixed load on `hpp-exec serve`: random requests, clients that leave, kill -9 and restarts, models that take turns, under a memory limit.

    tools/scripts/with-memory.sh 700M tools/scripts/with-deps.sh python3 tools/bench/mixed.py hpp-exec --minutes 5 a=PLAN b=PLAN \\
        -- --memory 200M --kv-ram 16M --kv-dir DIR

Every answer must equal the one that its request gets alone, on a server without a cache: text and probabilities, bit for bit. In the first 40 % of the
time the server is killed and started again; then it runs on, and its memory (RSS) must be flat. Ends with exit code 1 if anything is wrong."""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import threading
import time

WAIT = 300
KILL_SHARE = 0.4
FLAT = 0.02
WORDS = "vector string ownership borrow push file open read write loop list dict class method error thread channel iterator slice".split()


class Server:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.host = None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if "http://" in line:
                self.host = line.split("http://")[1].split()[0]
                break
        if self.host is None:
            sys.exit("the server did not start:\n" + "".join(lines))
        self.log = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def post(self, path, body, leave_after=None):
        """The answer; `None` if this client left after so many lines of it."""
        connection = http.client.HTTPConnection(self.host, timeout=WAIT)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if leave_after is None:
                return response.status, json.loads(response.read())
            for _ in range(leave_after):
                response.readline()
            return response.status, None
        finally:
            connection.close()

    def rss(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return int(fields["VmRSS"].split()[0]) / 1024, int(fields["VmHWM"].split()[0]) / 1024


def requests(models):
    """Requests with fixed answers: greedy and with a seed, short and long prompts, JSON, chat."""
    chance = random.Random(7)
    made = []
    for number in range(24):
        words = " ".join(chance.choice(WORDS) for _ in range(chance.choice([3, 10, 60, 120])))
        common = {"model": models[number % len(models)], "max_tokens": chance.choice([4, 16, 40]), "logprobs": 2}
        if number % 3 == 0:
            common |= {"temperature": 0.9, "seed": number}
        if number % 4 == 3:
            common.pop("logprobs")
            kind = {"messages": [{"role": "user", "content": f"What is {words[:40]}?"}], "logprobs": True}
            made.append(("/v1/chat/completions", common | kind))
        else:
            made.append(("/v1/completions", common | {"prompt": words}))
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    for model in models:
        made.append(("/v1/completions", {"model": model, "prompt": "JSON: ", "max_tokens": 40, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}))
    return made


class Load:
    """Threads that ask at random and compare."""

    def __init__(self, asked, expected):
        self.asked, self.expected = asked, expected
        self.server, self.is_killing, self.ends = None, False, False
        self.counts = {"answers": 0, "left": 0, "refused": 0, "lost to kills": 0, "wrong": 0}
        self.lock = threading.Lock()

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def run(self, seed):
        chance = random.Random(seed)
        while not self.ends:
            number = chance.randrange(len(self.asked))
            (path, body), server = self.asked[number], self.server
            body = dict(body, session_id=f"{seed}-{number}") if chance.random() < 0.2 else dict(body)
            body["priority"] = chance.randrange(-2, 3)
            try:
                if chance.random() < 0.2:
                    server.post(path, body | {"stream": True, "max_tokens": 200}, chance.randrange(6))
                    self.count("left")
                    continue
                status, answer = server.post(path, body)
            except (OSError, http.client.HTTPException, ValueError):
                self.count("lost to kills")
                if not self.is_killing and server is self.server:
                    self.count("wrong")
                    print("a request was lost, and the server was not killed", flush=True)
                time.sleep(0.1)
                continue
            if status in (429, 503):
                self.count("refused")
                time.sleep(0.2)
            elif status != 200 or answer["choices"] != self.expected[number]:
                self.count("wrong")
                print(f"wrong: {status} {json.dumps(answer)[:600]}\nfor {json.dumps(body)[:300]}\n"
                      f"expected {json.dumps(self.expected[number])[:600]}", flush=True)
            else:
                self.count("answers")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("plans", nargs="+", help="NAME=PLAN")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=6)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1:]
    command = [args.binary, "serve", *args.plans, "--port", "0"]
    models = [plan.split("=")[0] for plan in args.plans]
    asked = requests(models)

    alone = Server([*command, "--kv-ram", "0", "--max-sequences", "1"])
    expected = []
    for path, body in asked:
        status, answer = alone.post(path, body)
        if status != 200:
            sys.exit(f"{status} {answer}")
        expected.append(answer["choices"])
    alone.kill()

    load, chance, began = Load(asked, expected), random.Random(1), time.monotonic()
    load.server = Server([*command, *options])
    threads = [threading.Thread(target=load.run, args=(seed,), daemon=True) for seed in range(args.clients)]
    for thread in threads:
        thread.start()
    kills, most, sizes, seconds = 0, 0, [], args.minutes * 60
    died = False
    while (passed := time.monotonic() - began) < seconds and not died:
        time.sleep(1)
        if load.server.process.poll() is not None:
            died = True
            print("the server ended by itself:\n" + "".join(load.server.log[-20:]), flush=True)
            break
        rss, peak = load.server.rss()
        most = max(most, peak)
        if passed >= KILL_SHARE * seconds:
            sizes.append(rss)
        elif chance.random() < 0.1:
            load.is_killing = True
            load.server.kill()
            kills += 1
            load.server = Server([*command, *options])
            time.sleep(1)
            load.is_killing = False
    load.ends = True
    for thread in threads:
        thread.join(WAIT)
    load.server.kill()
    third = len(sizes) // 3
    middle, last = statistics.median(sizes[third:2 * third] or [0]), statistics.median(sizes[2 * third:] or [0])
    growth = last / middle - 1 if middle else 0
    print(json.dumps({**load.counts, "kills": kills, "peak RSS MiB": round(most), "RSS middle third MiB": round(middle, 1),
                      "RSS last third MiB": round(last, 1), "growth %": round(growth * 100, 2)}))
    if died or load.counts["wrong"] or not load.counts["answers"] or growth > FLAT:
        sys.exit(1)


if __name__ == "__main__":
    main()

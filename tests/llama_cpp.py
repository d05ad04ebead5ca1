"""llama.cpp in a process of its own: what it makes of texts and prompts with a model's file."""

import json
import subprocess
import sys
import urllib.request


def ask(file, *, texts=(), prompts=(), rows=0, chosen=None):
    """Ids of texts; and for each prompt, a list of ids, the log-probability of each of `rows` tokens that may follow.

    `chosen` is a token that is text by itself; the server says nothing about bytes of which it waits for the rest.
    """
    answer = _run(file, texts=list(texts), prompts=list(prompts), rows=rows, chosen=chosen)
    return answer["ids"], answer["following"]


def write_prompt(file, messages):
    """The text of messages by the chat template in the file, up to where the answer begins."""
    return _run(file, texts=[], prompts=[], messages=messages)["prompt"]


def _run(file, **request):
    command = [sys.executable, __file__, str(file)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(file):
    import xllamacpp

    request = json.load(sys.stdin)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_ctx, parameters.n_parallel, parameters.cpuparams.n_threads = 512, 1, 1
    parameters.warmup, parameters.verbosity, parameters.use_jinja = False, 0, True
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # in fp16
    server = xllamacpp.Server(parameters)

    def post(path, **body):
        call = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(),
                                      {"Content-Type": "application/json"})  # fmt: skip
        return json.load(urllib.request.urlopen(call))

    ids = [post("/tokenize", content=text)["tokens"] for text in request["texts"]]
    following = []
    for prompt in request["prompts"]:
        answer = post("/completion", prompt=prompt, n_predict=1, temperature=0, n_probs=request["rows"],
                      cache_prompt=False, logit_bias=[[request["chosen"], 1e3]])  # fmt: skip
        likely = {token["id"]: token["logprob"] for token in answer["completion_probabilities"][0]["top_logprobs"]}
        following.append([likely[number] for number in range(request["rows"])])
    messages = request.get("messages")
    prompt = post("/apply-template", messages=messages)["prompt"] if messages else None
    print(json.dumps({"ids": ids, "following": following, "prompt": prompt}))


if __name__ == "__main__":
    main(sys.argv[1])

"""Token ids of some texts under SmolLM2's tokenizer, from llama.cpp.

  pip install xllamacpp    # llama.cpp as a wheel; not needed by the tests
  python tests/policy/golden/make_smollm2_tokens.py [texts.json]

With a file, a JSON list of strings, nothing is kept: the texts are tokenized
by llama.cpp and by gdpo_jax, and the differences are counted.
"""

import http.client
import json
import pathlib
import sys
import urllib.parse

import xllamacpp

from gdpo_jax.policy import gguf, weights

TEXTS = [
  'Hello, world!',
  'a  12',  # two spaces before a digit: the digit leaves first
  'Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72',
  'He mows \u00be of 10,250 acres; that is 7 687.5.',
  "don't I'll we've THEY'RE 'S",
  '  leading and trailing   \n\n\t end \n',
  '<|im_start|>user\nhi 5<|im_end|>\n<|endoftext|>',
  '\u0434\u043b\u044f \u6f22\u5b57 \uff11\uff12 \u0663\u0667 \u2460',
  '\U0001f642\U0001f44d\U0001f3fd\u200d e\u0301 \u00e9 \u00a0\u3000x',
  'def f(x):\n    return x**2  # 3.14e-10\n',
  '',
]


def tokenize(texts):
  params = xllamacpp.CommonParams()
  params.model.path = str(weights.fetch('smollm2-135m'))
  params.n_ctx = 256
  server = xllamacpp.Server(params)
  address = urllib.parse.urlparse(server.listening_address)
  connection = http.client.HTTPConnection(address.hostname, address.port)
  for text in texts:
    question = {'content': text, 'add_special': False, 'parse_special': True}
    connection.request(
      'POST',
      '/tokenize',
      json.dumps(question),
      {'Content-Type': 'application/json'},
    )
    yield json.loads(connection.getresponse().read())['tokens']


def main():
  if len(sys.argv) > 1:
    texts = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding='utf-8'))
    tokenizer = gguf.load(weights.fetch('smollm2-135m')).tokenizer
    different = [
      text
      for text, ids in zip(texts, tokenize(texts))
      if tokenizer.encode(text) != ids
    ]
    print(f'{len(different)} of {len(texts)} texts differ', different[:5])
    return
  records = [
    {'text': text, 'ids': ids} for text, ids in zip(TEXTS, tokenize(TEXTS))
  ]
  out = pathlib.Path(__file__).with_name('smollm2_tokens.json')
  versions = {'xllamacpp': xllamacpp.__version__}
  out.write_text(
    json.dumps({'versions': versions, 'texts': records}, indent=1) + '\n'
  )


if __name__ == '__main__':
  main()

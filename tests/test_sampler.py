"""The sampler: distributions, ends, keys, buckets, and the trainer's view."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from gdpo_jax import sampler
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.sampler import generate
from gdpo_jax.sampling import Sampling, _invert, sample
from gdpo_jax.types import Prompts

CONFIG = PolicyConfig(
  family='llama',
  vocab_size=300,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  tied=True,
  max_positions=256,
)
POLICY = make_policy(CONFIG)
KEY = jax.random.key(7)
# Every row of these ends somewhere, not all in the same place.
EOS = tuple(range(7))


@pytest.fixture(scope='module')
def params():
  params = POLICY.init(jax.random.key(0))
  return jax.tree.map(lambda x: x * 10 if x.ndim == 3 else x, params)


@pytest.fixture(scope='module')
def prompts():
  """Four prompts of 6, 4, 1 and 0 real tokens."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(7, 300, (4, 6)).astype(np.int32)
  return Prompts(tokens, np.arange(6) >= np.array([[0], [2], [5], [6]]), [])


SAMPLING = Sampling(4, 80, temperature=0.7, eos_ids=EOS, pad_id=299)


@pytest.fixture(scope='module')
def rollout(params, prompts):
  return generate(POLICY, params, prompts, KEY, SAMPLING)


# --- one token ---------------------------------------------------------------

LOGITS = jnp.array([[2.0, 1.0, 0.0]])


def draw(uniform, **options):
  token, logp = sample(LOGITS, jnp.array([uniform]), Sampling(1, 1, **options))
  return int(token[0]), float(logp[0])


@pytest.mark.parametrize(
  ('uniform', 'options', 'token', 'logp'),
  [
    # softmax([2, 1, 0]) = 0.665241, 0.244728, 0.090031
    (0.0, {}, 0, -0.407606),
    (0.66, {}, 0, -0.407606),
    (0.67, {}, 1, -1.407606),
    (0.92, {}, 2, -2.407606),
    (0.999999, {}, 2, -2.407606),
    # softmax([4, 2, 0]), not the log-prob divided by the temperature
    (0.86, {'temperature': 0.5}, 0, -0.142932),
    (0.87, {'temperature': 0.5}, 1, -2.142932),
    # nucleus of 0.9: two tokens, renormalized to 0.731059 and 0.268941
    (0.73, {'top_p': 0.9}, 0, -0.313262),
    (0.999999, {'top_p': 0.9}, 1, -1.313262),
    (0.999999, {'top_p': 0.6}, 0, 0.0),
    (0.999999, {'top_k': 2}, 1, -1.313262),
    (0.999999, {'top_k': 1}, 0, 0.0),
    (0.999999, {'top_k': 5}, 2, -2.407606),
    # the second has 0.3679 of the first, the third 0.1353
    (0.999999, {'min_p': 0.3}, 1, -1.313262),
    (0.999999, {'min_p': 0.4}, 0, 0.0),
    # top-p of what top-k leaves: 0.731059 is enough for 0.7
    (0.999999, {'top_k': 2, 'top_p': 0.7}, 0, 0.0),
    # greedy, with the log-prob of temperature 1
    (0.999999, {'temperature': 0.0}, 0, -0.407606),
  ],
)
def test_one_draw_by_hand(uniform, options, token, logp):
  assert draw(uniform, **options) == (token, pytest.approx(logp, abs=1e-5))


def test_ties_keep_exactly_k():
  logits = jnp.zeros((200, 10))
  uniform = jnp.linspace(0, 0.9999, 200)
  for options in ({'top_k': 3}, {'top_p': 0.25}):
    token, logp = sample(logits, uniform, Sampling(1, 1, **options))
    assert set(token.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(logp, np.log(1 / 3), atol=1e-6)


def test_frequencies_follow_the_softmax():
  """Chi-square of 200,000 draws over 300 tokens (not a multiple of 128)."""
  count = 200_000
  logits = jax.random.normal(jax.random.key(1), (1, 300)) * 1.5
  uniforms = jax.random.uniform(jax.random.key(2), (count // 1000, 1000))
  tokens = jax.lax.map(
    lambda u: sample(jnp.broadcast_to(logits, (1000, 300)), u, Sampling(1, 1))[
      0
    ],
    uniforms,
  )
  seen = np.bincount(np.ravel(tokens), minlength=300)
  expected = count * np.asarray(jax.nn.softmax(logits[0]), np.float64)
  assert len(seen) == 300
  statistic = np.sum((seen - expected) ** 2 / expected)
  # 299 degrees of freedom: mean 299, standard deviation 24.5
  assert abs(statistic - 299) < 4 * 24.5


def test_no_draw_leaves_the_support():
  """A token of weight 0 is never hit, at the ends of [0, 1) or in between."""
  weights = jax.random.uniform(jax.random.key(0), (1, 1000))
  weights = jnp.where(jnp.arange(1000) % 7 == 3, weights, 0.0)
  uniforms = jnp.concatenate(
    [jnp.linspace(0, 1, 5000)[:-1], jnp.array([1 - 2**-24])]
  )
  token, _ = _invert(jnp.tile(weights, (5000, 1)), uniforms)
  assert jnp.all(weights[0, token] > 0)
  assert jnp.all(jnp.diff(token) >= 0)
  assert len(set(token.tolist())) == 143


# --- rollouts ----------------------------------------------------------------


@pytest.mark.parametrize('group_size', [1, 4])
def test_trainer_agrees(params, rollout, group_size):
  """Left padding of four lengths, temperature 0.7, two cache sizes."""
  logp, _ = POLICY.log_probs(
    params, rollout, group_size=group_size, temperature=0.7
  )
  np.testing.assert_allclose(logp, rollout.logp, atol=1e-4)
  assert rollout.logp.min() < -1  # not a degenerate model
  assert rollout.mask.sum(1).max() > sampler.BUCKET


def test_shapes_and_prompts(prompts, rollout):
  assert rollout.tokens.shape == rollout.mask.shape == (16, 80)
  assert rollout.logp.dtype == jnp.float32
  np.testing.assert_array_equal(rollout.prompt, prompts.tokens.repeat(4, 0))
  np.testing.assert_array_equal(rollout.prompt_mask, prompts.mask.repeat(4, 0))


def test_ends(rollout):
  """The first end token is kept, what follows is pads off the mask."""
  lengths = rollout.mask.sum(axis=1)
  assert len(set(lengths.tolist())) > 3
  for tokens, mask, logp, ended, n in zip(
    *map(np.asarray, rollout[2:]), lengths, strict=True
  ):
    assert mask[:n].all() and not mask[n:].any()
    assert not np.isin(tokens[: n - 1], EOS).any()
    assert np.isin(tokens[n - 1], EOS) == ended
    assert ended or n == 80
    assert (tokens[n:] == 299).all() and not logp[n:].any()


def test_several_ends_the_first_wins(params, prompts):
  free = generate(POLICY, params, prompts, KEY, Sampling(1, 8))
  row = free.tokens[0].tolist()
  assert len(set(row)) == 8
  assert free.mask.all() and not free.ended.any()
  ends = Sampling(1, 8, eos_ids=(row[5], row[2], row[7]))
  out = generate(POLICY, params, prompts, KEY, ends)
  assert out.tokens[0].tolist() == row[:3] + [0] * 5
  assert out.mask[0].tolist() == [True] * 3 + [False] * 5
  assert out.ended[0]
  # the one id of a tokenizer, where the model ends with another one
  other = next(i for i in range(300) if not jnp.any(free.tokens == i))
  out = generate(POLICY, params, prompts, KEY, Sampling(1, 8, eos_ids=other))
  assert out.mask.all() and not out.ended.any()


def test_end_tokens_as_tokenizers_give_them():
  assert Sampling(1, 8, eos_ids=5).eos_ids == (5,)
  assert Sampling(1, 8, eos_ids=[5, 6]) == Sampling(1, 8, eos_ids=(5, 6))


def test_a_row_depends_on_its_prompt_and_id_alone(params, prompts, rollout):
  """Another batch, other neighbours, more padding: the same sample."""
  wider = Prompts(
    np.pad(prompts.tokens[1:3], ((0, 0), (3, 0)), constant_values=5),
    np.pad(prompts.mask[1:3], ((0, 0), (3, 0))),
    [],
  )
  alone = generate(
    POLICY, params, wider, KEY, SAMPLING, row_ids=jnp.arange(4, 12)
  )
  np.testing.assert_array_equal(alone.tokens, rollout.tokens[4:12])
  np.testing.assert_allclose(alone.logp, rollout.logp[4:12], atol=1e-4)


def test_a_shorter_limit_is_a_prefix(params, prompts, rollout):
  short = generate(
    POLICY,
    params,
    prompts,
    KEY,
    Sampling(4, 9, temperature=0.7, eos_ids=EOS, pad_id=299),
  )
  np.testing.assert_array_equal(short.tokens, rollout.tokens[:, :9])


def test_limits_of_rows(params, prompts, rollout):
  """Each row is cut at its own limit, and counts as one that has not ended."""
  limits = np.random.default_rng(0).integers(1, 81, 16)
  limits[:2] = 1, 80
  out = generate(POLICY, params, prompts, KEY, SAMPLING, limits=limits)
  whole = np.asarray(rollout.mask).sum(axis=1)
  np.testing.assert_array_equal(out.mask.sum(1), np.minimum(whole, limits))
  np.testing.assert_array_equal(out.ended, rollout.ended & (whole <= limits))
  kept = np.asarray(out.mask)
  expected = np.where(kept, rollout.tokens, SAMPLING.pad_id)
  np.testing.assert_array_equal(out.tokens, expected)
  np.testing.assert_allclose(
    out.logp, np.where(kept, rollout.logp, 0), atol=1e-4
  )
  on_device = Prompts(*map(jnp.asarray, prompts[:2]), [])
  other = generate(POLICY, params, on_device, KEY, SAMPLING, limits=limits)
  np.testing.assert_array_equal(out.tokens, other.tokens)
  np.testing.assert_array_equal(out.ended, other.ended)


@pytest.mark.parametrize(
  ('limits', 'told'),
  [([1] * 15, '15.*16 rows'), ([0] * 16, '0 to 0'), ([81] * 16, '81.*80')],
)
def test_bad_limits_are_refused(params, prompts, limits, told):
  with pytest.raises(ValueError, match=told):
    generate(POLICY, params, prompts, KEY, SAMPLING, limits=limits)


def test_a_pad_that_is_an_end_ends_no_row(params, prompts):
  """Some models have one id for both (SmolLM2): a cut row has not ended."""
  both = Sampling(4, 8, eos_ids=2, pad_id=2)
  free = generate(POLICY, params, prompts, KEY, both)
  out = generate(POLICY, params, prompts, KEY, both, limits=[3] * 16)
  np.testing.assert_array_equal(
    out.ended, free.ended & (np.asarray(free.mask).sum(1) <= 3)
  )
  assert not out.ended.all()


def test_siblings_and_keys_differ(params, prompts, rollout):
  first = np.asarray(rollout.tokens[:4, 0])
  whole = {tuple(row) for row in np.asarray(rollout.tokens).tolist()}
  assert len(whole) == 16 and len(set(first.tolist())) > 1
  other = generate(POLICY, params, prompts, jax.random.key(8), SAMPLING)
  assert jnp.any(other.tokens != rollout.tokens)
  same = generate(POLICY, params, prompts, KEY, SAMPLING)
  np.testing.assert_array_equal(same.tokens, rollout.tokens)


def test_stages_change_nothing(params, prompts, rollout, monkeypatch):
  """Half of the rows go on alone; without that, the same samples."""
  batches = []

  def decode(weights, cache, token, *rest):
    batches.append(len(token))
    return POLICY.decode(weights, cache, token, *rest)

  policy = POLICY._replace(decode=decode)
  out = generate(policy, params, prompts, KEY, SAMPLING)
  assert set(batches) == {16, 8}
  np.testing.assert_array_equal(out.tokens, rollout.tokens)
  monkeypatch.setattr(sampler, 'FEWEST_ROWS', 9)
  whole = generate(POLICY, params, prompts, KEY, SAMPLING)
  for a, b in zip(out, whole, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_common_prefix_changes_nothing(params):
  """Worked examples in front of every prompt are read once for all rows."""
  rng = np.random.default_rng(1)
  tokens = rng.integers(7, 300, (4, 50)).astype(np.int32)
  mask = np.arange(50) >= np.array([[0], [2], [5], [9]])
  common = rng.integers(7, 300, 33)
  for row, start in zip(tokens, (0, 2, 5, 9), strict=True):
    row[start : start + 33] = common
  prompts = Prompts(tokens, mask, [])
  prefix, rest, _ = sampler.split_prefix(prompts)
  assert len(prefix) == 32 and rest.shape[1] == 24
  sampling = Sampling(3, 6, temperature=0.7)
  out = generate(POLICY, params, prompts, KEY, sampling)
  on_device = Prompts(jnp.asarray(tokens), jnp.asarray(mask), [])
  for a, b in zip(
    out, generate(POLICY, params, on_device, KEY, sampling), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-4)
  logp, _ = POLICY.log_probs(params, out, group_size=3, temperature=0.7)
  np.testing.assert_allclose(logp, out.logp, atol=1e-4)


def test_rounded_weights_are_near_a_trainer_that_rounds(params, prompts):
  sampling = Sampling(4, 30, dtype='bfloat16')
  out = generate(POLICY, params, prompts, KEY, sampling)
  errors = []
  for dtype in ('float32', 'bfloat16'):
    policy = make_policy(CONFIG, dtype)
    logp, _ = policy.log_probs(params, out, group_size=4)
    errors.append(float(jnp.abs(logp - out.logp).mean()))
  exact, rounded = errors
  assert 1e-4 < exact < 0.1
  assert rounded < exact / 2


def test_int8_weights_are_a_quarter_and_near(params, prompts):
  """Of logits, half a step of each weight; the mismatch is of hundredths."""
  sampling = Sampling(4, 30, dtype='int8')
  out = generate(POLICY, params, prompts, KEY, sampling)
  logp, _ = POLICY.log_probs(params, out, group_size=4)
  error = float(jnp.abs(logp - out.logp).mean())
  assert 1e-4 < error < 0.1

  def size(dtype):
    weights = POLICY.rollout_params(params, dtype)
    return sum(
      x.nbytes for x in jax.tree.leaves((weights['layers'], weights['head']))
    )

  assert 0.25 < size('int8') / size('float32') < 0.35
  weights = POLICY.rollout_params(params, 'int8')
  kernel = weights['layers'][0]['mlp']['down']
  whole = POLICY.rollout_params(params)['layers'][0]['mlp']['down']['kernel']
  assert kernel['kernel'].dtype == jnp.int8
  off = kernel['kernel'] * kernel['scale'][:, None] - whole
  assert jnp.all(jnp.abs(off) <= kernel['scale'][:, None] * 0.5001)


def test_greedy_is_the_argmax(params, prompts):
  out = generate(POLICY, params, prompts, KEY, Sampling(2, 5, temperature=0.0))
  np.testing.assert_array_equal(out.tokens[::2], out.tokens[1::2])
  tokens = jnp.concatenate([out.prompt, out.tokens], axis=1)[:6]
  mask = jnp.concatenate([out.prompt_mask, out.mask], axis=1)[:6]
  logits = POLICY.logits(params, tokens, mask)[:, 5:-1]
  np.testing.assert_array_equal(logits.argmax(-1), out.tokens[:6])
  logp = jax.nn.log_softmax(logits).max(-1)
  np.testing.assert_allclose(logp, out.logp[:6], atol=1e-4)


def test_a_prompt_of_pads_is_finite(params, rollout):
  assert jnp.isfinite(rollout.logp).all()


def test_a_single_token(params, prompts, rollout):
  one = Sampling(4, 1, temperature=0.7, eos_ids=EOS, pad_id=299)
  out = generate(POLICY, params, prompts, KEY, one)
  np.testing.assert_array_equal(out.tokens, rollout.tokens[:, :1])


def test_early_stop(params, prompts, monkeypatch):
  """The loop ends with the last row: 2 steps run, not 79."""
  steps = []

  def decode(*args):
    jax.debug.callback(lambda: steps.append(1))
    return POLICY.decode(*args)

  policy = POLICY._replace(decode=decode)
  everything = Sampling(4, 80, eos_ids=tuple(range(300)))
  out = generate(policy, params, prompts, KEY, everything)
  jax.effects_barrier()
  assert out.ended.all() and not steps
  some = Sampling(4, 80, eos_ids=tuple(range(150)))
  out = generate(policy, params, prompts, KEY, some)
  jax.effects_barrier()
  assert out.ended.all()
  assert len(steps) == out.mask.sum(axis=1).max() - 1


def test_one_trace(params, prompts):
  """Other prompts and weights of the same shape do not compile again."""
  count = []

  def prefill(*args):
    count.append(1)
    return POLICY.prefill(*args)

  policy = POLICY._replace(prefill=prefill)
  options = Sampling(2, 3)
  for seed in range(3):
    other = prompts._replace(tokens=(prompts.tokens + seed) % 300)
    scaled = jax.tree.map(lambda x: x * (1 + seed), params)  # noqa: B023
    generate(policy, scaled, other, jax.random.key(seed), options)
  assert len(count) == 1
  again = make_policy(PolicyConfig(**vars(CONFIG)))
  assert again is POLICY


def test_sharded_rows_and_weights(params, prompts, rollout):
  """Four devices: rows over one axis, then weights over it as well."""
  assert jax.device_count() >= 4, 'conftest forces four host devices'
  mesh = jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,))
  rows = NamedSharding(mesh, Spec('data'))

  def place(x):
    split = x.ndim == 3 and x.shape[-1] % 4 == 0
    spec = Spec(None, None, 'data') if split else Spec()
    return jax.device_put(x, NamedSharding(mesh, spec))

  sharded = Prompts(
    jax.device_put(prompts.tokens, rows),
    jax.device_put(prompts.mask, rows),
    [],
  )
  for tree in (
    jax.device_put(params, NamedSharding(mesh, Spec())),
    jax.tree.map(place, params),
  ):
    out = generate(POLICY, tree, sharded, KEY, SAMPLING)
    np.testing.assert_array_equal(out.tokens, rollout.tokens)
    np.testing.assert_allclose(out.logp, rollout.logp, atol=1e-4)
    logp, _ = POLICY.log_probs(tree, out, group_size=4, temperature=0.7)
    np.testing.assert_allclose(logp, rollout.logp, atol=1e-4)


# --- sizes and settings ------------------------------------------------------


def test_bucket_sizes():
  assert sampler.bucket_sizes(128) == [64, 128]
  assert sampler.bucket_sizes(1) == []
  assert sampler.bucket_sizes(2) == [16]
  assert sampler.bucket_sizes(65) == [64]
  assert sampler.bucket_sizes(100) == [64, 112]
  long = sampler.bucket_sizes(8000)
  assert 7999 <= long[-1] < 7999 + 16 and len(long) < 13
  assert all(a < b for a, b in zip(long, long[1:]))


def test_split_prefix():
  """70 tokens in common, of which 64 are a whole multiple of 32."""
  begin = np.arange(70)
  lengths = (90, 81, 100)
  tokens = np.full((3, 120), 7, np.int32)
  mask = np.zeros((3, 120), bool)
  for row, n in enumerate(lengths):
    tokens[row, -n:] = [*begin, *(np.arange(n - 70) + 1000 * (row + 1))]
    mask[row, -n:] = True
  prefix, rest, seen = sampler.split_prefix(Prompts(tokens, mask, []))
  assert prefix.tolist() == list(range(64))
  assert rest.shape == seen.shape == (3, 48)  # 36, rounded up
  for row, n in enumerate(lengths):
    whole = [*prefix, *rest[row][seen[row]]]
    assert whole == tokens[row, -n:].tolist()
  # alone, or with nothing in common, a prompt is only freed of its pads
  for part in (slice(0, 1), slice(0, 3)):
    some = Prompts(tokens[part] + np.arange(3)[part, None], mask[part], [])
    prefix, rest, seen = sampler.split_prefix(some)
    assert prefix is None
    assert seen.sum(axis=1).tolist() == list(lengths[part])
    assert rest.shape[1] == (96 if part.stop == 1 else 120)


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('group_size', {'group_size': 0}),
    ('max_new_tokens', {'max_new_tokens': 0}),
    ('temperature', {'temperature': -0.1}),
    ('temperature', {'temperature': float('nan')}),
    ('top_k', {'top_k': 0}),
    ('top_p', {'top_p': 0.0}),
    ('top_p', {'top_p': 1.5}),
    ('min_p', {'min_p': -1.0}),
    ('dtype', {'dtype': 'float16'}),
  ],
)
def test_bad_settings_are_refused(name, options):
  with pytest.raises(ValueError, match=name):
    Sampling(**({'group_size': 4, 'max_new_tokens': 8} | options))


def test_more_positions_than_the_model_has(params, prompts):
  with pytest.raises(ValueError, match='6 prompt tokens.*251.*256'):
    generate(POLICY, params, prompts, KEY, Sampling(1, 251))


def many_prompts(count=10):
  rng = np.random.default_rng(3)
  mask = np.arange(6) >= rng.integers(0, 5, (count, 1))
  tokens = rng.integers(7, 300, (count, 6)).astype(np.int32)
  return Prompts(np.where(mask, tokens, 0), mask, [])


def test_prompts_that_wait_are_sampled_as_if_at_once(params):
  """8 rows of 2 prompts in flight; the other 8 prompts enter as rows end."""
  prompts = many_prompts()
  sampling = Sampling(4, 90, dtype='float32', eos_ids=tuple(range(100, 104)))
  limits = np.random.default_rng(4).integers(1, 91, 40).astype(np.int32)
  ids = np.arange(40)[::-1].copy()
  whole = generate(
    POLICY, params, prompts, KEY, sampling, row_ids=ids, limits=limits
  )
  assert len(set(np.asarray(whole.mask).sum(1).tolist())) > 20
  parts = list(
    sampler.stream(
      POLICY, params, prompts, KEY, sampling, ids, 2, limits=limits
    )
  )
  assert len(parts) == 5
  for i, part in enumerate(parts):
    for got, expected in zip(part, whole, strict=True):
      expected = np.asarray(expected)[8 * i : 8 * i + 8]
      np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize('in_flight', [3, 4, 7, 10, 20])
def test_any_number_may_be_in_flight(params, in_flight):
  prompts = many_prompts()
  sampling = Sampling(2, 12, eos_ids=tuple(range(100, 140)))
  ids = np.arange(20)
  whole = generate(POLICY, params, prompts, KEY, sampling)
  parts = list(
    sampler.stream(POLICY, params, prompts, KEY, sampling, ids, in_flight)
  )
  assert len(parts) == -(-10 // in_flight)
  joined = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
  np.testing.assert_array_equal(joined.tokens, whole.tokens)
  np.testing.assert_array_equal(joined.prompt, whole.prompt)
  np.testing.assert_allclose(joined.logp, whole.logp, atol=1e-4)


def test_refill_compiles_few_programs(params):
  """Other lengths, other moments of entry: no program that was not there."""
  prompts = many_prompts()
  sampling = Sampling(4, 90)
  traces = []

  def decode(*args):
    traces.append(1)
    return POLICY.decode(*args)

  policy = POLICY._replace(decode=decode)

  def run(seed):
    rng = np.random.default_rng(seed)
    limits = rng.integers(1, 91, 40).astype(np.int32)
    rest = (sampling, np.arange(40), 2, None, limits)
    for _ in sampler.stream(policy, params, prompts, KEY, *rest):
      pass

  for seed in range(8):
    run(seed)
  # 8 rows with few sizes of the cache, each with and without prompts kept apart
  assert len(traces) <= 6

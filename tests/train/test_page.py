"""The report: figures that Plotly accepts, hostile texts, size, a real browser."""

import json
import shutil

import numpy as np
import pytest
import run_histories

from gdpo_jax.train import histograms, monitor, run_files, story
from gdpo_jax.train.page import html
from gdpo_jax.train.page.reward_graph import depths
from gdpo_jax.train.page.sections import SECTIONS
from gdpo_jax.train.rules import RewardInfo

HOSTILE = '</script><img src=x onerror="document.title=\'taken\'"><!-- {x}'


def write_run(directory, num_steps, every=10):
  """All files of a run with every metric there is."""
  directory.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(0)
  rows = run_histories.run(num_steps)
  pairs = ('grpo/dr_grpo', 'grpo/gdpo', 'dr_grpo/gdpo')
  for row in rows:
    row |= {
      f'{kind}/{pair}': float(rng.random())
      for kind in ('counterfactual/cosine', 'counterfactual/sign_flips')
      for pair in pairs
    }
    # steady, or a rule would have something to say
    row |= {'value/bias': 0.1, 'fusion/right/weight': 0.5}
    row |= {
      name: float(rng.random())
      for name in (
        'conflict/right/short', 'gradient_cosine/right/short', 'kl', 'kl/coef',
        'collapse/distinct_rewards', 'collapse/distinct_advantages/gdpo',
        'completions/up/mean_length', 'completions/down/mean_length',
        'completions/clipped_ratio', 'completions/up/clipped_ratio',
        'clip_ratio/region_mean', 'learning_rate', 'sampler_mismatch',
        'heads/right/grad_norm',
        'time/update', 'time/rewards', 'throughput/tokens_per_second',
        'throughput/tflops', 'throughput/mfu', 'frac_reward_zero_std',
      )
    }  # fmt: skip
  rows[0]['rewards/right/missing/timeout'] = 3.0
  rows[1]['grad_norm'] = None
  events = []
  watching = monitor.Monitor(run_histories.ABOUT)
  for row in rows:
    events += [e._asdict() for e in watching.check(row['step'], row)]
  events.append(
    monitor.Event(3, 'kl_high', 'kl', 'alarm', 'KL is high.')._asdict()
  )
  for step, right in ((0, 0.3), (num_steps, 0.6)):
    rows.append(
      {
        'step': step,
        'eval/completions/mean_length': 10.0,
        'eval/rewards/right/mean': right,
        'eval/rewards/right/stderr': 0.03,
        'eval/rewards/short/mean': right,
      }
    )
  samples = [
    {
      'step': step,
      'row': i,
      'group': i // 4,
      'prompt': [{'role': 'user', 'content': HOSTILE}] if i % 2 else HOSTILE,
      'completion': HOSTILE + ' word' * 60,
      'tokens': 60,
      'ended': True,
      'rewards': {'right': 1.0, 'short': None},
      'shaped': {'right': 1.0, 'short': None},
      'normalized': {'right': 0.123456789, 'short': None},
      'weighted': {'right': 0.123456789, 'short': None},
      'combined': 0.123456789,
      'advantage': 0.5,
      'counted': True,
      'failures': {'short': 'timeout: took 60 s'},
    }
    for step in range(1, num_steps + 1, every)
    for i in range(32)
  ]
  bins = [
    {
      'step': step,
      'advantages': histograms.log_histogram(rng.standard_normal(256)),
      'completions/length': histograms.log_histogram(rng.integers(1, 99, 256)),
    }
    for step in range(1, num_steps + 1)
  ]
  for name, records in (
    ('metrics', rows), ('events', events), ('samples', samples),
    ('histograms', bins),
  ):  # fmt: skip
    text = ''.join(json.dumps(record) + '\n' for record in records)
    (directory / f'{name}.jsonl').write_text(text)
  settings = {
    'num_steps': num_steps, 'algorithm': 'gdpo', 'prompts_per_step': 64,
    'group_size': 4,
  }  # fmt: skip
  (directory / 'settings.json').write_text(json.dumps(settings))
  (directory / 'contributions.json').write_text(
    json.dumps({'rewards': {'right': {'cosine': 0.5, 'rank_changes': 0.2}}})
  )
  monitor.write_about(directory, run_histories.ABOUT)
  return directory


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return write_run(tmp_path_factory.mktemp('runs') / 'run', 40)


def test_plotly_accepts_every_figure(run):
  import plotly.graph_objects as go

  loaded = run_files.load(run)
  content = html.content(loaded)
  cards = [c for section in content['sections'] for c in section['cards']]
  # this run has every metric, so no chart is left out
  assert [card['title'] for card in cards] == [
    card.title for section in SECTIONS for card in section.cards(loaded)
  ]
  for card in cards:
    go.Figure(data=card['data'], layout=card['layout'])  # checks every field
    assert set(card['hints']) <= {'plain', 'zero', 'bands', 'levels', 'height'}


def test_a_run_of_nothing_but_rows_has_a_report(tmp_path):
  rows = run_histories.run(2)
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (tmp_path / 'metrics.jsonl').write_text(text + '{"step": 3, "hal')
  made = run_files.load(tmp_path)
  assert made.names == ('right', 'short') and len(made.training) == 2
  content = html.content(made)
  assert content['samples'] == [] and content['sections']
  json.dumps(content, allow_nan=False)


def test_texts_cannot_leave_the_data(run):
  page = html.write(run).read_text(encoding='utf-8')
  assert HOSTILE[:20] not in page
  start = page.index('type="application/json">') + len(
    'type="application/json">'
  )
  data = json.loads(page[start : page.index('</script>', start)])
  assert data['samples'][0]['prompt'] == HOSTILE
  assert "default-src 'none'" in page


def test_500_steps_fit_into_8_megabytes(tmp_path):
  path = html.write(write_run(tmp_path, 500, every=2))
  assert path.stat().st_size < 8e6
  data = html.content(run_files.load(tmp_path))
  steps = {row['step'] for row in data['samples']}
  # too many for the page: thinned, whole steps, the last one is there
  assert max(steps) == 499 and 10 < len(steps) < 250
  assert len(data['samples']) == 32 * len(steps)


def test_thinning_keeps_the_last():
  assert html.thinned(list(range(10)), 4) == [0, 3, 6, 9]
  assert html.thinned(list(range(11)), 4) == [1, 4, 7, 10]
  assert html.thinned([1, 2], 4) == [1, 2]


def test_depths_of_a_hierarchy():
  chain = (
    RewardInfo('length', condition='right>=1 and safe>0.5'),
    RewardInfo('safe'),
    RewardInfo('right', condition='safe>0.5'),
  )
  assert depths(chain) == [2, 0, 1]


def test_verdicts_in_words(run):
  said = story.verdicts(run_files.load(run))
  texts = [v.text for v in said]
  assert said[0].mood == 'bad' and 'KL is high. (since step 3)' in texts[0]
  assert any(
    'right did not clearly move in training' in t
    and 'rose held-out (0.300 → 0.600)' in t
    for t in texts
  )
  assert any(
    'shares of the advantage are right 50%, short 50%' in t for t in texts
  )
  assert any(
    'Best trade-offs on held-out problems: step 40' in t for t in texts
  )


def test_change_is_told_from_chance():
  up = run_histories.run(30, **{'right/mean': lambda s: 0.2 + 0.02 * s})
  assert story.change(up, 'right').clear == 1
  still = run_histories.run(30)
  assert story.change(still, 'right').clear == 0
  assert story.change(still[:4], 'right') is None


@pytest.mark.slow
@pytest.mark.parametrize('width', (1366, 390))
def test_in_a_browser(run, width):
  """Drawn without a word in the console, rows clicked, nothing fetched."""
  api = pytest.importorskip('playwright.sync_api')
  chromium = shutil.which('chromium')
  if not chromium:
    pytest.skip('needs chromium (Debian: apt-get install chromium)')
  path = html.write(run)
  with api.sync_playwright() as p:
    browser = p.chromium.launch(executable_path=chromium, args=['--no-sandbox'])
    page = browser.new_page(viewport={'width': width, 'height': 800})
    said, asked = [], []
    page.on('console', lambda m: said.append(m.text))
    page.on('pageerror', lambda e: said.append(str(e)))
    page.on('request', lambda r: asked.append(r.url))
    page.goto(path.as_uri())
    height = page.evaluate('document.documentElement.scrollHeight')
    for y in range(0, height, 400):
      page.evaluate(f'window.scrollTo(0, {y})')
      page.wait_for_timeout(50)
    plots = page.locator('.plot').count()
    page.wait_for_function(
      f"document.querySelectorAll('.js-plotly-plot').length === {plots}"
    )
    assert page.evaluate('document.documentElement.scrollWidth') == width
    page.locator('#inspector select').select_option('11')
    page.locator('#inspector tbody tr').nth(2).click()
    detail = page.locator('#detail').inner_text()
    assert 'step 11, row 2, prompt 0' in detail
    assert 'right raises it by 0.123' in detail
    assert 'short gave no value' in detail and HOSTILE in detail
    page.get_by_text('row ›').click()
    assert 'row 3' in page.locator('#detail').inner_text()
    assert page.title() == 'run – report'
    browser.close()
  assert said == []
  assert all(url.startswith(('file:', 'data:', 'blob:')) for url in asked)

"""The environment contract of the launch scripts, and shares of rows."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

from gdpo_jax import processes

ROOT = pathlib.Path(__file__).parents[1]


def test_no_variable_means_one_process():
  assert processes.membership({'HOME': '/'}) is None
  assert processes.membership({'GDPO_COORDINATOR': ''}) is None


def test_all_three_variables_or_auto():
  given = {
    'GDPO_COORDINATOR': 'host:1',
    'GDPO_NUM_PROCESSES': '4',
    'GDPO_PROCESS_ID': '3',
  }
  assert processes.membership(given) == ('host:1', 4, 3, 60)
  auto = {'GDPO_COORDINATOR': 'auto', 'GDPO_HEARTBEAT_S': '5'}
  assert processes.membership(auto) == ('auto', None, None, 5)
  for name in given:
    part = {k: v for k, v in given.items() if k != name}
    with pytest.raises(ValueError, match=f'{name} is not'):
      processes.membership(part)


@pytest.mark.parametrize(
  'change, said',
  [
    ({'GDPO_PROCESS_ID': '4'}, 'run from 0 to 3'),
    ({'GDPO_PROCESS_ID': '-1'}, "is '-1'"),
    ({'GDPO_NUM_PROCESSES': '0'}, 'whole number >= 1'),
    ({'GDPO_HEARTBEAT_S': 'soon'}, "is 'soon'"),
  ],
)
def test_values_out_of_range_are_named(change, said):
  given = {
    'GDPO_COORDINATOR': 'host:1',
    'GDPO_NUM_PROCESSES': '4',
    'GDPO_PROCESS_ID': '3',
  }
  with pytest.raises(ValueError, match=said):
    processes.membership(given | change)


def test_forced_devices_have_threads_to_wait_with():
  for flags, given, threads in (
    ('', {}, None),
    ('--xla_force_host_platform_device_count=1', {}, None),
    ('--a=1 --xla_force_host_platform_device_count=64', {}, '256'),
    ('--xla_force_host_platform_device_count=64', {'PJRT_NPROC': '9'}, '9'),
  ):
    environment = {'XLA_FLAGS': flags, **given}
    processes.room_for_collectives(environment)
    assert environment.get('PJRT_NPROC') == threads


def test_shares_are_even_and_in_order():
  parts = [processes.share(124, 15, i) for i in range(15)]
  sizes = [part.stop - part.start for part in parts]
  assert sizes == [9] * 4 + [8] * 11
  assert [i for p in parts for i in range(p.start, p.stop)] == list(range(124))
  few = [processes.share(2, 3, i) for i in range(3)]
  assert [(p.start, p.stop) for p in few] == [(0, 1), (1, 2), (2, 2)]


ECHO = """
import json, os, sys
print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('GDPO')}))
sys.exit(int(os.environ['GDPO_PROCESS_ID']) * int(sys.argv[1]))
"""


def local_processes(num, *arguments, **env):
  return subprocess.run(
    [ROOT / 'launch/local_processes.sh', num, *arguments],
    env={'PATH': str(pathlib.Path(sys.executable).parent) + ':/usr/bin:/bin'}
    | env,
    capture_output=True,
    text=True,
    timeout=60,
  )


def test_local_processes_sets_the_contract():
  done = local_processes('3', sys.executable, '-c', ECHO, '0')
  assert done.returncode == 0, done.stderr
  seen = [processes.membership(json.loads(x)) for x in done.stdout.splitlines()]
  assert sorted(member.process_id for member in seen) == [0, 1, 2]
  assert {member.num_processes for member in seen} == {3}
  assert len({member.coordinator for member in seen}) == 1


def test_local_processes_reports_the_first_failure():
  done = local_processes('2', sys.executable, '-c', ECHO, '7')
  assert done.returncode == 7 and 'ended with status 7' in done.stderr
  # the other one ends later: nobody waits for the grace to be over
  late = 'import os, sys, time; i = int(os.environ["GDPO_PROCESS_ID"]); '
  late += 'time.sleep(2 * (1 - i)); sys.exit(7 * i)'
  done = local_processes('2', sys.executable, '-c', late)
  assert done.returncode == 7 and 'for the other 1 to notice' in done.stderr
  assert local_processes('none').returncode == 2


SCRIPTS = sorted(
  [*ROOT.glob('launch/*.sh'), *ROOT.glob('launch/*.sbatch')],
)


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_has_nothing_to_say(script):
  beside = pathlib.Path(sys.executable).parent / 'shellcheck'
  found = shutil.which('shellcheck') or (beside.exists() and str(beside))
  if not found:
    pytest.skip('shellcheck is not installed (it is in the [dev] extra)')
  done = subprocess.run([found, script], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def _object(required=(), **fields):
  return {
    'type': 'object',
    'additionalProperties': False,
    'required': list(required),
    'properties': fields,
  }


TEXT, WHOLE, YES = ({'type': t} for t in ('string', 'integer', 'boolean'))
LABEL = {'type': 'string', 'pattern': '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'}
# The fields of jobset.x-k8s.io/v1alpha2 as its API reference lists them; the Job
# inside has a schema of its own. Parts that are not used here are any object.
JOBSET = _object(
  ('apiVersion', 'kind', 'metadata', 'spec'),
  apiVersion={'const': 'jobset.x-k8s.io/v1alpha2'},
  kind={'const': 'JobSet'},
  metadata=_object(
    ('name',),
    name=LABEL,
    namespace=LABEL,
    labels={'additionalProperties': TEXT},
    annotations={'additionalProperties': TEXT},
  ),
  spec=_object(
    ('replicatedJobs',),
    replicatedJobs={
      'type': 'array',
      'minItems': 1,
      'items': _object(
        ('name', 'template'),
        name=LABEL,
        groupName=LABEL,
        replicas=WHOLE,
        template=_object(('spec',), metadata={}, spec={'type': 'object'}),
        dependsOn={'type': 'array', 'maxItems': 1},
      ),
    },
    failurePolicy=_object(
      maxRestarts=WHOLE, restartStrategy=TEXT, rules={'type': 'array'}
    ),
    network=_object(
      enableDNSHostnames=YES, subdomain=LABEL, publishNotReadyAddresses=YES
    ),
    successPolicy={'type': 'object'},
    startupPolicy={'type': 'object'},
    coordinator={'type': 'object'},
    suspend=YES,
    managedBy=TEXT,
    ttlSecondsAfterFinished=WHOLE,
  ),
)


def test_the_jobset_holds_a_valid_job():
  jsonschema = pytest.importorskip('jsonschema')  # kubernetes-validate has it
  kubernetes_validate = pytest.importorskip(
    'kubernetes_validate', reason='kubernetes-validate is in the [dev] extra'
  )
  jobset = yaml.safe_load((ROOT / 'launch/gke_jobset.yaml').read_text())
  jsonschema.validate(jobset, JOBSET)
  for wrong in ({'replicas': 1}, {'failurePolicy': {'maxRestarts': '20'}}):
    with pytest.raises(jsonschema.ValidationError):
      changed = {**jobset, 'spec': {**jobset['spec'], **wrong}}
      jsonschema.validate(changed, JOBSET)
  (replicated,) = jobset['spec']['replicatedJobs']
  job = {
    'apiVersion': 'batch/v1',
    'kind': 'Job',
    'metadata': {'name': 'slice'},
    'spec': replicated['template']['spec'],
  }
  version = kubernetes_validate.latest_version()
  kubernetes_validate.validate(job, version, strict=True)
  # One process for each host, and the contract as the scripts set it.
  spec = job['spec']
  (container,) = spec['template']['spec']['containers']
  env = {entry['name']: entry.get('value') for entry in container['env']}
  hosts = spec['completions']
  assert spec['parallelism'] == hosts == int(env['GDPO_NUM_PROCESSES'])
  env['GDPO_PROCESS_ID'] = '0'  # from the pod's index
  # <set>-<job>-<index of the job>-<index of the pod>.<set>
  assert processes.membership(env).coordinator == 'gdpo-slice-0-0.gdpo:29400'

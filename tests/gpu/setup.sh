set -e
export PYTHONPATH=$PWD/src:$PWD/build/carry PYTHONUNBUFFERED=1
python setup.py -q build_ext --inplace > /tmp/build.log 2>&1 || tail -5 /tmp/build.log

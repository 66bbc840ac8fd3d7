{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{/* The release's name, before every object's own. 45: "-controller" and the hash of a pod stay below 63. */}}
{{- define "megascale-ops.name" -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of every object besides its own. */}}
{{- define "megascale-ops.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "megascale-ops.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Where agents and jobs find the controller. */}}
{{- define "megascale-ops.url" -}}
{{- if .Values.controllerUrl -}}
{{ .Values.controllerUrl }}
{{- else if .Values.controller.enabled -}}
http://{{ include "megascale-ops.name" . }}-controller.{{ .Release.Namespace }}.svc:7070
{{- else -}}
{{- fail "controller.enabled is false, so agents and jobs need controllerUrl: http://NAME.NAMESPACE.svc:7070" -}}
{{- end -}}
{{- end -}}

{{/* What the pods of controller and agents have alike: the image's pull secrets. */}}
{{- define "megascale-ops.pull" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "megascale-ops.pullPolicy" -}}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{/* The token's volume. */}}
{{- define "megascale-ops.token" -}}
- name: token
  secret:
    secretName: {{ .secret }}
    defaultMode: 0400
    {{- if ne .key "token" }}
    items: [{key: {{ .key | quote }}, path: token}]
    {{- end }}
{{- end -}}
